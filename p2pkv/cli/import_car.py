"""``p2pkv import``: take over an artifact out of a file that `p2pkv export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import open_progress, show_bytes
from p2pkv.units import format_bytes, plural


def import_car(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file, as `p2pkv export` writes it.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over an artifact from a CAR file.

    The p2pkv-node of this home serves and announces it from then on. Everything is verified first, and the publisher has to
    be trusted (`p2pkv trust add`); where anything is wrong or missing, nothing is taken over. What the home has already, of
    a fetch or of another artifact that begins alike, is not written again and may be missing in the file.

    \b
    Example:
      p2pkv import book.car
    """
    with reporting(as_json, interrupted="Nothing was taken over; run the command again.") as output:
        from p2pkv.client.sync import Client

        path = file.expanduser().absolute()
        with Client(home_of(home)) as client, open_progress(output) as show:
            imported = client.import_car(path, on_progress=show_bytes(show, "reading"))
        artifact = imported.artifact
        tokens = artifact.manifest.tokens.count
        document = {
            "manifest": str(artifact.cid),
            "publisher": artifact.manifest.publisher,
            "tokens": tokens,
            "blocks": len(imported.cids),
            "bytes": imported.file_bytes,
            "staged_bytes": imported.staged_bytes,
        }
        pairs = [
            ("manifest", str(artifact.cid)),
            ("publisher", artifact.manifest.publisher),
            (
                "size",
                f"{plural(tokens, 'token')}, {format_bytes(imported.file_bytes)}, "
                f"{format_bytes(imported.staged_bytes)} of it were not here already",
            ),
        ]
        output.result(document, fields(pairs))
