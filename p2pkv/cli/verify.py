"""``p2pkv verify``: check everything that can be checked of an artifact, without a network."""

from __future__ import annotations

import typer

from p2pkv.cli.artifacts import Verdict, check, open_source
from p2pkv.cli.inspect import ArtifactArgument
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import reporting
from p2pkv.cli.progress import Moment, open_progress
from p2pkv.cli.trust import trust_file
from p2pkv.units import format_bytes, plural

# A screenful; --json tells all of them.
_SHOWN_FAULTS = 20


def verify(artifact: ArtifactArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Check an artifact and its stored blocks.

    Format, signature, tokens, the hash of every block that is stored here, expiry and trust. Tells each fault with its
    code; the first one decides the exit status. A damaged block is removed from the home, so that `p2pkv fetch` mends the
    artifact. Needs neither a network nor a daemon.

    \b
    Example:
      p2pkv verify bafyr4iabc...
      p2pkv verify book.envelope
    """
    with reporting(as_json, interrupted="Nothing but damaged blocks was changed; run the command again.") as output:
        place = home_of(home)
        source = open_source(artifact, place)
        with open_progress(output) as show:
            verdict = check(
                source,
                trust_file(place),
                lambda done, total: show(Moment("checking blocks", done, total, f"{done} of {plural(total, 'segment')}")),
            )
        output.result(verdict.to_dict(), _lines(verdict))
        if verdict.faults:
            raise typer.Exit(verdict.faults[0].exit_status)


def _lines(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for fault in verdict.faults[:_SHOWN_FAULTS]:
        lines += [f"fault  {fault.message} [{fault.code}]", f"       {fault.advice}"]
    if len(verdict.faults) > _SHOWN_FAULTS:
        lines.append(f"       and {len(verdict.faults) - _SHOWN_FAULTS} more; --json lists all")
    if verdict.manifest is not None:
        lines.append(f"signature  valid, of {verdict.manifest.publisher}")
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
