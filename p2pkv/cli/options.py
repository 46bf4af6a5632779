"""Options and arguments that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from p2pkv.errors import UsageError
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_TEXT_FILE_BYTES
from p2pkv.store.files import os_errors
from p2pkv.store.home import default_home
from p2pkv.units import DAY, HOUR

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="FOLDER",
        help="The p2pkv home. [default: $P2PKV_HOME, else the platform's data folder]",
        readable=False,  # a home that cannot be read is told as one of $P2PKV_HOME is, and examined by the doctor
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, an error as JSON on stderr, and no progress.")
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder (config, safetensors, tokenizer).")]
TextArgument = Annotated[Path, typer.Argument(metavar="TEXTFILE", help="UTF-8 text whose KV is to be shared.")]
NameOption = Annotated[str | None, typer.Option(help="Model name for people. [default: the folder's name]")]
ExpiresOption = Annotated[str | None, typer.Option(metavar="WHEN", help="12h, 30d, 2w or a date; never where not given.")]
_TORCH_NAMES: Final = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "float32": Dtype.FP32}


def parse_dtype(text: str) -> Dtype:
    """Return the dtype of this project's or torch's name for it. Raises BadParameter, which shows the option's name."""
    try:
        return _TORCH_NAMES.get(text) or Dtype(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(Dtype)}") from None


DtypeOption = Annotated[
    Dtype,
    typer.Option(
        parser=parse_dtype,
        metavar="bf16|fp16|fp32",
        help="Precision the model runs in; a cache fits only the precision it was made in.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")]

_LAYERS: Final = re.compile(r"(\d{1,6}):(\d{1,6})", re.ASCII)


def parse_layers(text: str) -> range:
    """Return the layers that ``A:B`` names, from A up to and without B. Raises BadParameter, which shows the option's name."""
    found = _LAYERS.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no range such as 0:8, from the first layer up to and without the last")
    return range(int(found[1]), int(found[2]))


_DURATION: Final = re.compile(r"(\d{1,6})([hdw])")
_UNIT_SECONDS: Final = {"h": HOUR, "d": DAY, "w": 7 * DAY}


def show_help(context: typer.Context) -> None:
    """Show what there is to a group of commands that was called without one, and exit as for a usage error."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError("").exit_status)


def home_of(option: Path | None) -> Path:
    """Return the home that ``--home`` names, else the default one; absolute."""
    return default_home() if option is None else option.expanduser().absolute()


def parse_expiry(text: str, now: float) -> int:
    """Return when ``30d``, ``12h``, ``2w``, ``2027-01-31`` or an ISO time is, in seconds since the epoch; UTC where not said.

    Raises UsageError for anything else, and for what is over already.
    """
    duration = _DURATION.fullmatch(text)
    if duration is not None:
        moment = int(now) + int(duration[1]) * _UNIT_SECONDS[duration[2]]
    else:
        try:
            parsed = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"{text!r} is no time to expire", advice="Say 12h, 30d, 2w, or a date such as 2027-01-31."
            ) from None
        moment = int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    if moment <= now:
        raise UsageError(f"{text!r} is not in the future", advice="Choose a later time, or leave --expires away.")
    return moment


def read_file(path: Path, most: int, *, advice: str, what: str = "file") -> bytes:
    """Return what is in a file, of one that is too large ``most`` bytes and one more.

    Raises UsageError with ``advice`` where there is no file, StoreError.
    """
    if not path.is_file():
        raise UsageError(f"there is no {what} {path}", advice=advice)
    with os_errors(f"read {path}"), path.open("rb") as file:
        return file.read(most + 1)


def read_text(path: Path) -> str:
    """Return a text file's content, byte for byte. Raises UsageError where it is missing, too large, empty or not UTF-8."""
    data = read_file(path, MAX_TEXT_FILE_BYTES, advice="Name a UTF-8 text file.", what="text file")
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise UsageError(f"{path} exceeds {MAX_TEXT_FILE_BYTES} bytes", advice="Split the text.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})", advice="Convert it to UTF-8.") from None
    if not text:
        raise UsageError(f"{path} is empty", advice="Name a file with text in it.")
    return text
