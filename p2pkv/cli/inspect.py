"""``p2pkv inspect``: show an artifact as a person reads it."""

from __future__ import annotations

from typing import Annotated

import typer

from p2pkv.cli.artifacts import open_source, standing
from p2pkv.cli.manifest_view import content_pairs, describe, term_pairs
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.formats.draft import NOBODY, open_root
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust

ArtifactArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="Manifest CID of an artifact in the home, or a CAR, envelope or draft file.")
]


def inspect(artifact: ArtifactArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what an artifact is and who made it.

    Model, layers, tokens, sizes, producer, publisher, terms, and whether this home would use it, and why not.
    Nothing of an artifact whose signature does not verify is shown; one that is not signed yet is told as that. Whether its
    blocks are right is for `p2pkv verify`.

    \b
    Example:
      p2pkv inspect bafyr4iabc...
      p2pkv inspect book.car --json
    """
    with reporting(as_json) as output:
        place = home_of(home)
        source = open_source(artifact, place)
        source.cid.check(source.envelope)
        manifest = open_root(source.envelope)
        signed = manifest.publisher != NOBODY
        faults = standing(manifest, source.cid, HomeTrust(HomeLayout(place)))
        held = sum(map(source.blocks.has, manifest.segments)) if source.blocks is not None else 0
        document = {
            "manifest": str(source.cid) if signed else None,
            **describe(manifest),
            "segments_stored": held,
            "signature": "valid" if signed else "none",
            "usable": not faults,
            "faults": [fault.to_dict() for fault in faults],
        }
        pairs = [
            ("manifest" if signed else "draft", str(source.cid)),
            *content_pairs(manifest, held if source.car is None else None),
            ("signature", "valid" if signed else "none yet"),
            *(term_pairs(manifest) if signed else []),
        ]
        if faults:
            pairs += [("standing" if not at else "", f"not usable: {fault}") for at, fault in enumerate(faults)]
        else:
            pairs.append(("standing", "usable here: publisher trusted, not revoked, not expired"))
        output.result(document, fields(pairs))
