"""``p2pkv generate``: answer a question about a text, with the text's KV from peers where somebody published it."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nacl.signing import SigningKey

from p2pkv.cli import models
from p2pkv.cli.fetch import peer_lines
from p2pkv.cli.key_file import open_key
from p2pkv.cli.options import DeviceOption, DtypeOption, HomeOption, JsonOption, ModelArgument, home_of, read_text
from p2pkv.cli.output import Output, printable, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.progress import FetchView, Moment, open_progress
from p2pkv.formats.tensors import Dtype
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_key_file
from p2pkv.units import format_seconds, plural

if TYPE_CHECKING:
    from p2pkv.client.report import Prefill
    from p2pkv.connectors.hf.checkpoint import Checkpoint


def generate(
    model: ModelArgument,
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="The text the question is about, as it was published.")],
    question: Annotated[str, typer.Option(help="What you want to know about it.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="Longest answer.")] = 128,
    dtype: DtypeOption = Dtype.BF16,
    device: DeviceOption = "cpu",
    shared: Annotated[
        bool,
        typer.Option(help="Others share exactly the file: with this, its last tokens short of a segment are found too."),
    ] = True,
    patience: Annotated[
        float, typer.Option(min=1, max=86_400, help="Fetch for so many seconds, then compute the rest.")
    ] = 60.0,
    verify: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="What has to hold beyond the publisher's signature: signature (nothing more), sample or sample=N (N random "
            "tokens, recomputed, are what was loaded), quorum=K (K accepted publishers signed the same) or full (everything, "
            "recomputed, is).",
        ),
    ] = "signature",
    passphrase_file: PassphraseFileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question about a text, sooner.

    What peers published of the text is loaded and not computed; the greedy answer is the same with and
    without peers. It goes to stdout; how it came about goes to stderr. Without a
    daemon, or with nobody who has the text, everything is computed here.

    \b
    Example:
      p2pkv generate ./SmolLM2-135M --prompt-file book.txt --question "Who is Ishmael?"
    """
    with reporting(as_json, interrupted="What arrived is kept: the same command uses it.") as output:
        from p2pkv.client.sync import Client
        from p2pkv.client.verification import Verify

        Verify.parse(verify)  # before a model is loaded
        text = read_text(prompt_file)
        reader = _reader(home_of(home), passphrase_file)
        with Client(home_of(home)) as client:
            with open_progress(output) as show:
                show(Moment(f"loading {model}"))
                checkpoint = models.load(model, dtype, device)
                document = checkpoint.document_ids(text)
                ids = [*document, *checkpoint.question_ids(question)]
                checkpoint.check_length(len(ids) + max_new_tokens)
                show(Moment("prefilling"))
                started = time.monotonic()
                prefill = client.prefill(
                    checkpoint.model,
                    ids,
                    shared=len(document) if shared else None,
                    patience_s=patience,
                    verify=verify,
                    reader=reader,
                    on_event=FetchView(show),
                )
            answer, first_s = _answer(output, checkpoint, ids, prefill, max_new_tokens, started)
        took = time.monotonic() - started
        _report(output, checkpoint.text(answer), answer, prefill, first_s, took)


def _reader(home: Path, passphrase_file: Path | None) -> SigningKey | None:
    """Return the home's key where it has grants to open and a passphrase is on it that can be given.

    Where it cannot, the prefill says so and computes. Raises WrongPassphraseError, UsageError.
    """
    path = HomeLayout(home).publisher_key
    if not path.exists() or not any(True for _ in GrantFiles(home)):
        return None
    file = read_key_file(path)
    if not file.encrypted or (passphrase_file is None and not sys.stdin.isatty()):
        return None
    return open_key(file, passphrase_file)


def _answer(
    output: Output, checkpoint: Checkpoint, ids: list[int], prefill: Prefill, count: int, started: float
) -> tuple[list[int], float]:
    """Return the answer's tokens and the seconds to the first; print the text as it grows."""
    from p2pkv.connectors.hf.checkpoint import greedy

    answer: list[int] = []
    said = 0
    first_s: float | None = None
    for token in greedy(checkpoint.model, ids, prefill.cache, count):
        first_s = first_s if first_s is not None else time.monotonic() - started
        answer.append(token)
        text = checkpoint.text(answer)
        # An unfinished character ends in the replacement character until its last byte is there.
        if not output.as_json and len(text) > said and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            output.raw(_speakable(text[said:]))
            said = len(text)
    if not output.as_json:
        output.raw(f"{_speakable(checkpoint.text(answer)[said:])}\n")
    return answer, first_s if first_s is not None else time.monotonic() - started


def _speakable(text: str) -> str:
    """Return a model's text with its line breaks and nothing else that could steer a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _report(output: Output, text: str, answer: list[int], prefill: Prefill, first_s: float, took: float) -> None:
    report = prefill.report
    if output.as_json:
        document: dict[str, Any] = {
            "answer": text,
            "token_ids": answer,
            "time_to_first_token_s": first_s,
            "took_s": took,
            "report": {**asdict(report), "bytes_fetched": report.bytes_fetched},
        }
        output.result(document, [])
        return
    output.note(
        f"{report}; first token after {format_seconds(first_s)}, {plural(len(answer), 'token')} in {format_seconds(took)}"
    )
    for line in peer_lines(dict(report.bytes_by_peer), dict(report.rate_by_peer)):
        output.note(line)
    if report.verification is not None and report.verification.passed:
        output.note(f"  {report.verification}")
    for refusal in report.refusals:
        output.note(f"  not used: {refusal['manifest']}: {refusal['message']} [{refusal['code']}] {refusal['advice']}")
