"""``p2pkv fetch``: let the daemon fetch an artifact, as a mirror does, or a slice of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of, parse_layers
from p2pkv.cli.output import Output, reporting
from p2pkv.cli.progress import FetchView, open_progress
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_SEGMENTS
from p2pkv.units import format_bytes, format_rate, format_seconds, plural


def fetch(
    manifest: Annotated[str, typer.Argument(metavar="CID", help="Manifest CID, as `p2pkv publish` prints it.")],
    segments: Annotated[
        int | None, typer.Option(min=1, max=MAX_SEGMENTS, help="Fetch only so many segments, from the start.")
    ] = None,
    layers: Annotated[
        range | None, typer.Option(parser=parse_layers, metavar="A:B", help="Fetch only the layers from A up to, without, B.")
    ] = None,
    patience: Annotated[float, typer.Option(min=1, max=86_400, help="Give up after so many seconds.")] = 600.0,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch an artifact, verified, to mirror it.

    The p2pkv-node of this home stores it and serves it to others from then on. Of an artifact that is fetched in part,
    segments count as held once all of their layers are here.
    The publisher has to be trusted first (`p2pkv trust add`). Ctrl-C ends it within two seconds; everything that arrived is
    kept, and the same command goes on from there.

    \b
    Example:
      p2pkv fetch bafyr4iabc...
      p2pkv fetch bafyr4iabc... --segments 4 --layers 0:8
    """
    interrupted = "What arrived is kept: run the same command again to resume."
    with reporting(as_json, interrupted=interrupted) as output:
        from p2pkv.client.sync import Client

        cid = Cid.parse(manifest)
        with Client(home_of(home)) as client, open_progress(output) as show:
            view = FetchView(show)
            report = client.fetch(cid, segments=segments, layers=layers, patience_s=patience, on_event=view)
        _show(output, {name: value for name, value in report.items() if name != "event"})


def _show(output: Output, report: dict[str, Any]) -> None:
    took, size = report["times"].get("done_s", 0.0), sum(report["bytes_by_peer"].values())
    lines = [
        f"fetched {report['manifest']}",
        *([] if report["complete"] else [slice_line(report)]),
        f"{plural(report['hit_tokens'], 'token')}, {format_bytes(size)} from {plural(len(report['bytes_by_peer']), 'peer')} "
        f"in {format_seconds(took)}, {format_bytes(report['local_bytes'])} were here already",
        *peer_lines(report["bytes_by_peer"], report["rate_by_peer"]),
    ]
    for name, what in (("blocks_refused", "block"), ("peers_lost", "peer")):
        if report[name]:
            lines.append(f"{plural(report[name], what)} {'refused' if what == 'block' else 'lost'} on the way")
    output.result(report, lines)


def slice_line(report: dict[str, Any]) -> str:
    """Return the line that says what of an artifact was fetched."""
    first, end = report["layers"]
    return f"{plural(report['segments'], 'segment')} in layers {first}:{end}, of {report['token_count']:,} tokens in all"


def peer_lines(bytes_by_peer: dict[str, int], rate_by_peer: dict[str, float]) -> list[str]:
    """Return a line per peer that sent something, the most first."""
    ranked = sorted(bytes_by_peer.items(), key=lambda item: -item[1])
    return [f"  {peer}  {format_bytes(size):>10}  {format_rate(rate_by_peer.get(peer, 0.0)):>12}" for peer, size in ranked]
