"""``p2pkv verify``: check everything that can be checked of an artifact, and let a node mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from p2pkv.cli.artifacts import Verdict, check, open_source
from p2pkv.cli.gc import parse_manifest
from p2pkv.cli.inspect import ArtifactArgument
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import Output, reporting
from p2pkv.cli.progress import FetchView, Moment, open_progress
from p2pkv.errors import FetchIncompleteError, IntegrityError, NotFoundError, P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import NOBODY
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.units import format_bytes, plural

# A screenful; --json tells all of them.
_SHOWN_FAULTS = 20
# What fetching again helps against.
_MENDABLE: Final[tuple[type[P2pkvError], ...]] = (IntegrityError, NotFoundError, FetchIncompleteError)


def verify(
    artifact: ArtifactArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Let the node of this home fetch again what is damaged or missing.")
    ] = False,
    patience: Annotated[float, typer.Option(min=1, max=86_400, help="With --repair: give up after so many seconds.")] = 600.0,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an artifact and its stored blocks.

    Format, signature, tokens, the hash of every block that is stored here, or in the CAR file, expiry and trust. Tells each
    fault with its code; the first one decides the exit status. Needs neither a network nor a daemon.

    With --repair the p2pkv-node of this home fetches from its peers what is damaged or missing, and everything is checked
    once more.

    \b
    Example:
      p2pkv verify bafyr4iabc... --repair
      p2pkv verify book.car
    """
    with reporting(as_json, interrupted="Nothing but damaged blocks was changed; run the command again.") as output:
        place = home_of(home)
        verdict, repaired = _check(output, artifact, place, or_none=repair), False
        if repair and (verdict is None or any(isinstance(fault, _MENDABLE) for fault in verdict.faults)):
            _fetch_again(output, parse_manifest(artifact) if verdict is None else verdict.cid, place, patience)
            verdict, repaired = _check(output, artifact, place), True
        assert verdict is not None, "only a first look may see nothing"
        output.result({**verdict.to_dict(), "repaired": repaired}, _lines(verdict))
        if verdict.faults:
            raise typer.Exit(verdict.faults[0].exit_status)


def _check(output: Output, artifact: str, home: Path, *, or_none: bool = False) -> Verdict | None:
    """Check everything; with ``or_none``, a manifest that is damaged or missing is no error."""

    def show_segment(done: int, total: int) -> None:
        show(Moment("checking blocks", done, total, f"{done} of {plural(total, 'segment')}"))

    try:
        with open_progress(output) as show:
            return check(open_source(artifact, home), HomeTrust(HomeLayout(home)), show_segment)
    except _MENDABLE:
        if or_none:
            return None
        raise


def _fetch_again(output: Output, cid: Cid, home: Path, patience_s: float) -> None:
    """Let the node fetch an artifact; it reads what is here, and asks for what is not, or not any more."""
    from p2pkv.client.sync import Client

    with Client(home) as client, open_progress(output) as show:
        client.fetch(cid, patience_s=patience_s, on_event=FetchView(show))


def _lines(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for fault in verdict.faults[:_SHOWN_FAULTS]:
        lines += [f"fault  {fault.message} [{fault.code}]", f"       {fault.advice}"]
    if len(verdict.faults) > _SHOWN_FAULTS:
        lines.append(f"       and {len(verdict.faults) - _SHOWN_FAULTS} more; --json lists all")
    if verdict.manifest is not None:
        signed = verdict.manifest.publisher != NOBODY
        lines.append(f"signature  valid, of {verdict.manifest.publisher}" if signed else "signature  none yet")
        if not verdict.tokens_checked:
            lines.append("tokens     not checked: the block of the token ids is not stored here")
        if verdict.blocks:
            lines.append(
                f"blocks     {plural(verdict.blocks, 'block')} and nodes checked, {format_bytes(verdict.bytes)} of KV; "
                f"{verdict.complete_segments} of {plural(len(verdict.manifest.segments), 'segment')} complete"
            )
        else:
            lines.append("blocks     none stored here, none checked")
    lines.append(f"{'not usable' if verdict.faults else 'all right'}: {verdict.cid}")
    return lines
