"""``p2pkv import``: take over an artifact out of a file that `p2pkv export` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import FileView, open_progress
from p2pkv.units import format_bytes, plural


def import_car(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CAR file, as `p2pkv export` writes it.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over an artifact from a CAR file.

    The p2pkv-node of this home reads the file, and serves and announces the artifact from then on. Everything is verified
    first, and the publisher has to be trusted (`p2pkv trust add`); where anything is wrong or missing, nothing is listed.
    What the home has already, of an interrupted import, of a fetch or of another artifact that begins alike, is not written
    again and may be missing in the file.

    \b
    Example:
      p2pkv import book.car
    """
    with reporting(as_json, interrupted="What was stored is kept; run the command again to go on.") as output:
        from p2pkv.client.sync import Client

        path = file.expanduser().absolute()
        with Client(home_of(home)) as client, open_progress(output) as show:
            imported = client.import_car(path, on_event=FileView(show))
        del imported["event"]
        output.result(imported, fields(imported_pairs(imported)))


def imported_pairs(imported: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the node's report of an import says, line by line."""
    size, new = format_bytes(imported["bytes"]), format_bytes(imported["new_bytes"])
    return [
        ("manifest", imported["manifest"]),
        ("publisher", imported["publisher"]),
        ("size", f"{plural(imported['tokens'], 'token')}, {size}, {new} of it were not here already"),
    ]
