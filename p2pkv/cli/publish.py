"""``p2pkv publish``: compute the KV of a text, sign it, and let the daemon serve it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli import models
from p2pkv.cli.keygen import load_key
from p2pkv.cli.options import (
    DeviceOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    ModelArgument,
    home_of,
    parse_expiry,
    read_text,
)
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import FileView, Moment, open_progress
from p2pkv.cli.trust import trust_file
from p2pkv.formats.did import encode_did
from p2pkv.formats.tensors import Dtype
from p2pkv.units import format_bytes, format_seconds, plural


def publish(
    model: ModelArgument,
    textfile: Annotated[Path, typer.Argument(metavar="TEXTFILE", help="UTF-8 text whose KV is to be shared.")],
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key to sign with. [default: keys/publisher.key in the home]")
    ] = None,
    licence: Annotated[str, typer.Option(help="Terms of the text, e.g. CC0-1.0.")] = "",
    expires: Annotated[str | None, typer.Option(metavar="WHEN", help="12h, 30d, 2w or a date; never where not given.")] = None,
    name: Annotated[str | None, typer.Option(help="Model name for people. [default: the folder's name]")] = None,
    dtype: DtypeOption = Dtype.BF16,
    device: DeviceOption = "cpu",
    trust: Annotated[bool, typer.Option(help="Trust the key on this node too, so that it uses its own artifacts.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute, sign and share the KV of a text.

    The p2pkv-node of this home serves and announces it. Prints the manifest CID. Others who trust your did:key then skip
    this part of their prefill: `p2pkv generate` with the same text file, or `p2pkv fetch` to mirror it. The KV of a text
    tells the text: publish only what everybody may read.

    \b
    Example:
      p2pkv publish ./SmolLM2-135M book.txt --licence CC0-1.0 --expires 30d
    """
    with reporting(as_json, interrupted="Nothing was published; run the command again.") as output:
        from p2pkv.client.sync import Client

        place, started = home_of(home), time.monotonic()
        signer = load_key(key, place)
        did = encode_did(bytes(signer.verify_key))
        text = read_text(textfile)
        end = parse_expiry(expires, time.time()) if expires is not None else None
        with Client(place) as client, open_progress(output) as show:
            client.status()  # whoever publishes nowhere shall hear so before minutes of computing
            show(Moment(f"loading {model}"))
            checkpoint = models.load(model, dtype, device)
            ids = checkpoint.document_ids(text)
            checkpoint.check_length(len(ids))
            show(Moment("reading the weights for the model id"))
            staged = client.publish(
                checkpoint.model,
                ids,
                signer,
                model_name=name,
                licence=licence,
                expires=end,
                on_progress=lambda done, total: show(Moment("computing", done, total, f"{done:,} of {total:,} tokens")),
                on_event=FileView(show),
            )
        if trust:
            trust_file(place).add(did, "the key of this node", int(time.time()))
        document = {
            "manifest": str(staged.manifest),
            "publisher": did,
            "tokens": staged.token_count,
            "blocks": len(staged.cids),
            "bytes": staged.bytes,
            "dtype": dtype.value,
            "expires": end,
            "trusted": trust,
        }
        took = format_seconds(time.monotonic() - started)
        pairs = [
            ("manifest", str(staged.manifest)),
            ("publisher", did),
            ("size", f"{plural(staged.token_count, 'token')}, {format_bytes(staged.bytes)}, in {took}"),
        ]
        output.result(document, fields(pairs))
        output.note(f"Consumers run `p2pkv trust add {did}` once.")
