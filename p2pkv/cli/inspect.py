"""``p2pkv inspect``: show an artifact as a person reads it."""

from __future__ import annotations

from typing import Annotated

import typer

from p2pkv.cli.artifacts import date, describe, expiry, layer_lines, open_source, standing
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.trust import trust_file
from p2pkv.formats.envelope import Envelope
from p2pkv.units import format_bytes, plural

ArtifactArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="Manifest CID of an artifact in the home, or the file of an envelope.")
]


def inspect(artifact: ArtifactArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what an artifact is and who made it.

    Model, layers, tokens, sizes, producer, publisher, terms, and whether this home would use it.
    Nothing of an artifact whose signature does not verify is shown. Whether its blocks are right is for `p2pkv verify`.

    \b
    Example:
      p2pkv inspect bafyr4iabc...
      p2pkv inspect book.envelope --json
    """
    with reporting(as_json) as output:
        place = home_of(home)
        source = open_source(artifact, place)
        source.cid.check(source.envelope)
        manifest = Envelope.decode(source.envelope).open()
        faults = standing(manifest, trust_file(place))
        nodes = manifest.segments
        held = sum(source.blocks.has(node) for node in nodes) if source.blocks is not None else 0
        document = {
            **describe(source.cid, manifest),
            "segments_stored": held,
            "signature": "valid",
            "usable": not faults,
            "faults": [fault.to_dict() for fault in faults],
        }
        layers = layer_lines(manifest.layers)
        pairs = [
            ("manifest", str(source.cid)),
            ("model", f"{manifest.model_name} (id {manifest.model_id.hex()})"),
            ("values", f"{manifest.dtype.value}, codec {manifest.codec}"),
            ("layers", layers[0]),
            *(("", line) for line in layers[1:]),
            ("tokens", f"{plural(manifest.tokens.count, 'token')} in {plural(len(nodes), 'segment')}, {held} of them here"),
            ("size", f"{format_bytes(document['kv_bytes'])} of KV"),
            ("producer", ", ".join(f"{name} {value}" for name, value in manifest.producer.items()) or "not told"),
            ("publisher", f"{manifest.publisher}, sequence {manifest.sequence}"),
            ("signature", "valid"),
            ("created", date(manifest.created)),
            ("expires", expiry(manifest.expires)),
            ("licence", manifest.licence or "not told"),
            ("standing", "usable here: publisher trusted, not expired" if not faults else ""),
        ]
        if faults:
            del pairs[-1]
            pairs += [("standing" if not at else "", f"not usable: {fault}") for at, fault in enumerate(faults)]
        output.result(document, fields(pairs))
