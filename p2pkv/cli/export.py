"""``p2pkv export``: write an artifact to a file that can be carried."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from p2pkv.cli.artifacts import Source, open_source
from p2pkv.cli.inspect import ArtifactArgument
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import FileView, Show, open_progress, show_steps
from p2pkv.errors import FetchIncompleteError
from p2pkv.store.car_file import write_car
from p2pkv.store.home import find_holder
from p2pkv.units import format_bytes, plural


def export(
    artifact: ArtifactArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file to write; one that is there is replaced.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an artifact to a CAR file.

    The file holds all of the artifact with its signature, to be carried to a machine without a network: `p2pkv import`
    reads it there. Every block is hashed on its way; an artifact that is not whole is refused. FILE.part is written, which
    becomes FILE when it is complete; after an interruption the same command goes on with it. The p2pkv-node of this home
    writes it, so that nothing is collected meanwhile; where none runs, the command does.

    \b
    Example:
      p2pkv export bafyr4iabc... book.car
    """
    with reporting(as_json, interrupted="What was written is in FILE.part; run the command again to go on.") as output:
        path, place = file.expanduser().absolute(), home_of(home)
        source = open_source(artifact, place)
        with open_progress(output) as show:
            if source.stored and find_holder(place) is not None:
                written = _by_node(source, path, place, show)
            else:
                written = _by_itself(source, path, show)
        document = {"manifest": str(source.cid), "file": str(path), **written}
        size = f"{plural(written['tokens'], 'token')}, {format_bytes(written['bytes'])}"
        output.result(document, fields([("manifest", str(source.cid)), ("file", str(path)), ("size", size)]))


def _by_node(source: Source, path: Path, home: Path, show: Show) -> dict[str, Any]:
    from p2pkv.client.sync import Client

    with Client(home) as client:
        report = client.export_car(source.cid, path, on_event=FileView(show))
    return {name: report[name] for name in ("tokens", "blocks", "bytes")}


def _by_itself(source: Source, path: Path, show: Show) -> dict[str, Any]:
    if source.blocks is None:
        raise FetchIncompleteError(f"no block of {source.cid} is stored here", advice=f"Run `p2pkv fetch {source.cid}`.")
    written = write_car(source.cid, source.envelope, source.blocks, path, show_steps(show))
    tokens = written.artifact.manifest.tokens.count
    return {"tokens": tokens, "blocks": written.blocks, "bytes": written.file_bytes}
