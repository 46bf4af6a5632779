"""``p2pkv publish``: compute the KV of a text, sign it, and let the daemon serve it; or serve what is signed in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli import models
from p2pkv.cli.import_car import imported_pairs
from p2pkv.cli.key_file import KeyOption, find_key, open_key
from p2pkv.cli.options import (
    DeviceOption,
    DtypeOption,
    ExpiresOption,
    HomeOption,
    JsonOption,
    NameOption,
    home_of,
    parse_expiry,
    read_text,
)
from p2pkv.cli.output import Output, fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.progress import FileView, Moment, open_progress
from p2pkv.cli.trust import trust_file
from p2pkv.errors import SignatureError, UsageError
from p2pkv.formats.draft import NOBODY, open_root
from p2pkv.formats.tensors import Dtype
from p2pkv.store.car_reading import is_car, read_root
from p2pkv.store.namespaces import read_namespace
from p2pkv.store.sequence import next_sequence
from p2pkv.units import format_bytes, format_seconds, plural


def publish(
    source: Annotated[
        Path,
        typer.Argument(metavar="MODEL|FILE", help="Checkpoint folder (config, safetensors, tokenizer), or a signed CAR file."),
    ],
    textfile: Annotated[
        Path | None, typer.Argument(metavar="TEXTFILE", help="With MODEL: UTF-8 text whose KV is to be shared.")
    ] = None,
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    licence: Annotated[str | None, typer.Option(help="Terms of the text, e.g. CC0-1.0.")] = None,
    expires: ExpiresOption = None,
    name: NameOption = None,
    dtype: DtypeOption = Dtype.BF16,
    device: DeviceOption = "cpu",
    trust: Annotated[bool, typer.Option(help="Trust the key on this node too, so that it uses its own artifacts.")] = False,
    private: Annotated[
        str | None, typer.Option(metavar="NAME", help="Seal it in this namespace: only readers with a grant can open it.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Share the KV of a text: compute and sign it, or take it from a signed file.

    The p2pkv-node of this home serves and announces it. Prints the manifest CID. Others who trust your did:key then skip
    this part of their prefill: `p2pkv generate` with the same text file, or `p2pkv fetch` to mirror it. The KV of a text
    tells the text: publish only what everybody may read, or with --private what those may to whom you `p2pkv grant` it.

    A signed CAR file, of `p2pkv sign` or `p2pkv join`, needs neither key nor model here. Its publisher has to be trusted on
    this node, as for `p2pkv import`; --trust does that as well.

    \b
    Example:
      p2pkv publish ./SmolLM2-135M book.txt --licence CC0-1.0 --expires 30d
      p2pkv publish book.signed.car --trust
    """
    with reporting(as_json, interrupted="Nothing was published; run the command again.") as output:
        place = home_of(home)
        if textfile is None:
            if (
                key is not None
                or passphrase_file is not None
                or licence is not None
                or expires is not None
                or name is not None
                or private is not None
            ):
                raise UsageError(
                    "a file that is signed has its key, licence, expiry and name already",
                    advice="Leave these options away, or name a text file behind the model.",
                )
            _publish_file(output, source.expanduser().absolute(), place, trust=trust)
        else:
            started = time.monotonic()
            keys = find_key(key, place)
            signer = open_key(keys, passphrase_file)
            text = read_text(textfile)
            namespace = read_namespace(place, private) if private is not None else None
            end = parse_expiry(expires, time.time()) if expires is not None else None

            from p2pkv.client.sync import Client

            with Client(place) as client, open_progress(output) as show:
                client.status()  # whoever publishes nowhere shall hear so before minutes of computing
                show(Moment(f"loading {source}"))
                checkpoint = models.load(source, dtype, device)
                ids = checkpoint.document_ids(text)
                checkpoint.check_length(len(ids))
                show(Moment("reading the weights for the model id"))
                staged = client.publish(
                    checkpoint.model,
                    ids,
                    signer,
                    model_name=name,
                    licence=licence or "",
                    expires=end,
                    namespace=namespace,
                    sequence=next_sequence(keys.path, keys.did, time.time()),
                    on_progress=lambda done, total: show(Moment("computing", done, total, f"{done:,} of {total:,} tokens")),
                    on_event=FileView(show),
                )
            if trust:
                trust_file(place).add(keys.did, "the key of this node", int(time.time()))
            document = {
                "manifest": str(staged.manifest),
                "publisher": keys.did,
                "tokens": staged.token_count,
                "blocks": len(staged.cids),
                "bytes": staged.bytes,
                "dtype": dtype.value,
                "expires": end,
                "trusted": trust,
                "private": private is not None,
            }
            took = format_seconds(time.monotonic() - started)
            pairs = [
                ("manifest", str(staged.manifest)),
                ("publisher", keys.did),
                ("size", f"{plural(staged.token_count, 'token')}, {format_bytes(staged.bytes)}, in {took}"),
            ]
            output.result(document, fields(pairs))
            if private is not None:
                output.note(f"Nobody else can open it yet: `p2pkv grant {staged.manifest} did:key:...` lets somebody.")
            output.note(f"Consumers run `p2pkv trust add {keys.did}` once.")


def _publish_file(output: Output, path: Path, home: Path, *, trust: bool) -> None:
    """Let the node take over a signed CAR file."""
    from p2pkv.client.sync import Client

    if path.is_dir():
        raise UsageError(f"{path} is a folder, and no text file is named", advice="Say `p2pkv publish MODEL TEXTFILE`.")
    if not path.is_file() or not is_car(path):
        raise UsageError(f"{path} is no CAR file", advice="Name one that `p2pkv sign` wrote, or a model and a text file.")
    manifest = open_root(read_root(path))
    if manifest.publisher == NOBODY:
        raise SignatureError(f"the artifact in {path} is not signed", advice=f"Run `p2pkv sign {path} --out FILE` first.")
    with Client(home) as client, open_progress(output) as show:
        client.status()
        if trust:
            trust_file(home).add(manifest.publisher, f"the publisher of {path.name}", int(time.time()))
        imported = client.import_car(path, on_event=FileView(show))
    del imported["event"]
    output.result({**imported, "expires": manifest.expires, "trusted": trust}, fields(imported_pairs(imported)))
    output.note(f"Consumers run `p2pkv trust add {manifest.publisher}` once.")
