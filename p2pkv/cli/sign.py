"""``p2pkv sign`` and ``p2pkv join``: a signature under what was built, offline, and its way back to the file with the KV."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.artifact.build import Terms
from p2pkv.artifact.signing import sign_manifest
from p2pkv.cli.artifacts import read_node_file
from p2pkv.cli.key_file import KeyOption, find_key, open_key
from p2pkv.cli.manifest_view import content_pairs, term_pairs
from p2pkv.cli.options import ExpiresOption, HomeOption, JsonOption, home_of, parse_expiry
from p2pkv.cli.output import Output, fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.progress import open_progress, show_steps
from p2pkv.errors import UsageError
from p2pkv.formats.draft import NOBODY, open_root
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.store.car_file import write_pieces
from p2pkv.store.car_reading import CheckedCar, check_car, is_car
from p2pkv.store.car_signing import write_signed
from p2pkv.store.progress import Progress
from p2pkv.store.sequence import next_sequence
from p2pkv.units import format_bytes

OutOption = Annotated[Path, typer.Option(metavar="FILE", help="File to write; one that is there is replaced.")]
_AGAIN = "Run the command again; a sequence number may be left out, which does no harm."


def sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file or draft, as `p2pkv build` writes them.")],
    out: OutOption,
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    licence: Annotated[str | None, typer.Option(help="Terms of the text, e.g. CC0-1.0.")] = None,
    expires: ExpiresOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact, offline.

    Of a CAR file everything is checked, and FILE is written as a CAR file again, under your signature. Of a draft alone the
    envelope is written, which `p2pkv join` puts into the CAR file on the machine that has it. What you sign is shown before,
    and you are asked. Needs neither a network, nor a p2pkv-node, nor the model. What was signed already with your key can be
    signed again: its licence stays where none is given, and its sequence number grows.

    \b
    Example:
      p2pkv sign book.car --out book.signed.car --licence CC0-1.0 --expires 30d
      p2pkv sign book.draft --out book.envelope --key team.key
    """
    with reporting(as_json, interrupted=_AGAIN) as output:
        source, target = file.expanduser().absolute(), out.expanduser().absolute()
        now = time.time()
        end = parse_expiry(expires, now) if expires is not None else None
        keys = find_key(key, home_of(home))
        with open_progress(output) as show:
            car = _check(source, show_steps(show))
        manifest = car.artifact.manifest if car is not None else open_root(read_node_file(source))
        if manifest.publisher not in (NOBODY, keys.did):
            raise UsageError(
                f"{source} is signed by {manifest.publisher}, and the key is that of {keys.did}",
                advice="Sign with the key of its publisher, or sign the file that was built.",
            )
        chosen = licence if licence is not None else manifest.licence
        _ask(output, manifest, Terms(keys.did, manifest.sequence, int(now), end, chosen), yes)
        signer = open_key(keys, passphrase_file)
        terms = Terms(keys.did, next_sequence(keys.path, keys.did, now), int(now), end, chosen)
        envelope = sign_manifest(manifest, terms, signer)
        with open_progress(output) as show:
            _write(car, source, envelope, target, show_steps(show))
        document = {
            "manifest": str(envelope.cid),
            "file": str(target),
            "publisher": keys.did,
            "sequence": terms.sequence,
            "expires": end,
            "licence": chosen,
        }
        pairs = [
            ("manifest", str(envelope.cid)),
            ("publisher", f"{keys.did}, sequence {terms.sequence}"),
            ("file", str(target)),
        ]
        output.result(document, fields(pairs))


def join(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file, as `p2pkv build` writes it.")],
    envelope: Annotated[Path, typer.Argument(metavar="ENVELOPE", help="Envelope, as `p2pkv sign` writes it for a draft.")],
    out: OutOption,
    as_json: JsonOption = False,
) -> None:
    """Put an envelope into the CAR file whose draft it signs.

    Both are checked, also that they belong together. Needs no key.

    \b
    Example:
      p2pkv join book.car book.envelope --out book.signed.car
    """
    with reporting(as_json, interrupted="What was written is in FILE.part; run the command again.") as output:
        source, target = file.expanduser().absolute(), out.expanduser().absolute()
        signed = Envelope.decode(read_node_file(envelope.expanduser().absolute()))
        with open_progress(output) as show:
            written = write_signed(check_car(source, show_steps(show)), source, signed, target, show_steps(show))
        publisher = signed.open().publisher
        document = {"manifest": str(signed.cid), "file": str(target), "publisher": publisher, "bytes": written.file_bytes}
        pairs = [
            ("manifest", str(signed.cid)),
            ("publisher", publisher),
            ("file", f"{target}, {format_bytes(written.file_bytes)}"),
        ]
        output.result(document, fields(pairs))


def _check(path: Path, on_progress: Progress) -> CheckedCar | None:
    """Return a CAR file, all of it checked; ``None`` for a file that is none. Raises UsageError, as check_car does."""
    return check_car(path, on_progress) if path.is_file() and is_car(path) else None


def _write(
    car: CheckedCar | None, source: Path, envelope: Envelope, target: Path, on_progress: Callable[[str, int, int], None]
) -> None:
    if car is not None:
        write_signed(car, source, envelope, target, on_progress)
    else:
        data = envelope.encode()
        write_pieces(target, [data], len(data), on_progress)


def _ask(output: Output, manifest: Manifest, terms: Terms, yes: bool) -> None:
    """Show what is to be signed, and ask. Raises UsageError where nobody can be asked, and for a no."""
    said = replace(manifest, publisher=terms.publisher, created=terms.created, expires=terms.expires, licence=terms.licence)
    for line in fields([*content_pairs(manifest), *(pair for pair in term_pairs(said) if pair[0] != "publisher")]):
        output.note(line)
    output.note(f"to be signed by {terms.publisher}")
    if yes:
        return
    if output.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("nobody can be asked whether to sign this", advice="Look at it with `p2pkv inspect`, then add --yes.")
    if not typer.confirm("Sign it?", err=True):
        raise UsageError("not signed", advice="Nothing was written.")
