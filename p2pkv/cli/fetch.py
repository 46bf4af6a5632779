"""``p2pkv fetch``: let the daemon fetch a whole artifact, as a mirror does."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import Output, reporting
from p2pkv.cli.progress import FetchView, open_progress
from p2pkv.errors import DaemonUnreachableError
from p2pkv.formats.cid import Cid
from p2pkv.units import format_bytes, format_rate, format_seconds, plural


def fetch(
    manifest: Annotated[str, typer.Argument(metavar="CID", help="Manifest CID, as `p2pkv publish` prints it.")],
    patience: Annotated[float, typer.Option(min=1, max=86_400, help="Give up after so many seconds.")] = 600.0,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a whole artifact, verified, to mirror it.

    The p2pkv-node of this home stores it and serves it to others from then on.
    The publisher has to be trusted first (`p2pkv trust add`). Ctrl-C ends it within two seconds; everything that arrived is
    kept, and the same command goes on from there.

    \b
    Example:
      p2pkv fetch bafyr4iabc...
    """
    interrupted = "What arrived is kept: run the same command again to resume."
    with reporting(as_json, interrupted=interrupted) as output:
        from p2pkv.client.sync import Client

        cid = Cid.parse(manifest)
        with Client(home_of(home)) as client, open_progress(output) as show:
            report = client.fetch(cid, patience_s=patience, on_event=FetchView(show))
        if not report:
            raise DaemonUnreachableError("the p2pkv-node ended before the fetch did", advice=interrupted)
        _show(output, {name: value for name, value in report.items() if name != "event"})


def _show(output: Output, report: dict[str, Any]) -> None:
    took, size = report["times"].get("done_s", 0.0), sum(report["bytes_by_peer"].values())
    lines = [
        f"fetched {report['manifest']}",
        f"{plural(report['hit_tokens'], 'token')}, {format_bytes(size)} from {plural(len(report['bytes_by_peer']), 'peer')} "
        f"in {format_seconds(took)}, {format_bytes(report['local_bytes'])} were here already",
        *peer_lines(report["bytes_by_peer"], report["rate_by_peer"]),
    ]
    for name, what in (("blocks_refused", "block"), ("peers_lost", "peer")):
        if report[name]:
            lines.append(f"{plural(report[name], what)} {'refused' if what == 'block' else 'lost'} on the way")
    output.result(report, lines)


def peer_lines(bytes_by_peer: dict[str, int], rate_by_peer: dict[str, float]) -> list[str]:
    """Return a line per peer that sent something, the most first."""
    ranked = sorted(bytes_by_peer.items(), key=lambda item: -item[1])
    return [f"  {peer}  {format_bytes(size):>10}  {format_rate(rate_by_peer.get(peer, 0.0)):>12}" for peer, size in ranked]
