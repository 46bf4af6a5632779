"""``p2pkv export``: write an artifact to a file that can be carried."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.artifacts import open_source
from p2pkv.cli.inspect import ArtifactArgument
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import open_progress, show_bytes
from p2pkv.errors import FetchIncompleteError
from p2pkv.store.car_file import write_car
from p2pkv.units import format_bytes, plural


def export(
    artifact: ArtifactArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file to write; one that is there is replaced.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an artifact to a CAR file.

    The file holds all of the artifact with its signature, to be carried to a machine without a network: `p2pkv import`
    reads it there. Every block is hashed on its way; an artifact that is not whole is refused. The file appears when it is
    complete. Needs neither a network nor a daemon.

    \b
    Example:
      p2pkv export bafyr4iabc... book.car
    """
    with reporting(as_json, interrupted="No file was written; run the command again.") as output:
        path = file.expanduser().absolute()
        source = open_source(artifact, home_of(home))
        if source.blocks is None:
            raise FetchIncompleteError(f"no block of {source.cid} is stored here", advice=f"Run `p2pkv fetch {source.cid}`.")
        with open_progress(output) as show:
            written = write_car(source.cid, source.envelope, source.blocks, path, show_bytes(show, "writing"))
        tokens = written.artifact.manifest.tokens.count
        document = {
            "manifest": str(source.cid),
            "file": str(path),
            "tokens": tokens,
            "blocks": len(written.cids),
            "bytes": written.file_bytes,
        }
        pairs = [
            ("manifest", str(source.cid)),
            ("file", str(path)),
            ("size", f"{plural(tokens, 'token')}, {format_bytes(written.file_bytes)}"),
        ]
        output.result(document, fields(pairs))
