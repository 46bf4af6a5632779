"""``p2pkv build``: compute the KV of a text into a file that its publisher signs elsewhere."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli import models
from p2pkv.cli.options import DeviceOption, DtypeOption, JsonOption, ModelArgument, NameOption, TextArgument, read_text
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.progress import Moment, open_progress, show_steps
from p2pkv.errors import UsageError
from p2pkv.formats.tensors import Dtype
from p2pkv.store.files import os_errors
from p2pkv.store.spool import clear_unlocked, create_locked
from p2pkv.units import format_bytes, format_seconds, plural


def build(
    model: ModelArgument,
    textfile: TextArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="CAR file to write; one that is there is replaced.")],
    draft: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the draft also alone, to be carried to the key and signed there."),
    ] = None,
    name: NameOption = None,
    dtype: DtypeOption = Dtype.BF16,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Compute the KV of a text and write it to a file, unsigned.

    For the machine that has the model, where there shall be no key: needs no p2pkv-node and no home. Carry the file to the
    machine with the key, `p2pkv sign` it there and `p2pkv publish` it. Or carry the draft only, which is small, and bring
    the envelope back, which `p2pkv join` puts into the file. Nobody uses what is not signed.

    \b
    Example:
      p2pkv build ./SmolLM2-135M book.txt --out book.car
      p2pkv build ./SmolLM2-135M book.txt --out book.car --draft book.draft
    """
    with reporting(as_json, interrupted="No file was written; run the command again.") as output:
        from p2pkv.artifact.signing import NO_TERMS
        from p2pkv.client.publishing import build_artifact
        from p2pkv.formats.cid import Cid
        from p2pkv.formats.draft import encode_draft, open_root
        from p2pkv.store.blocks import BlockPacks
        from p2pkv.store.car_file import write_car, write_pieces

        started, path = time.monotonic(), out.expanduser().absolute()
        text = read_text(textfile)
        with open_progress(output) as show, _folder_beside(path) as folder, closing(BlockPacks(folder)) as blocks:
            show(Moment(f"loading {model}"))
            checkpoint = models.load(model, dtype, device)
            ids = checkpoint.document_ids(text)
            checkpoint.check_length(len(ids))
            show(Moment("reading the weights for the model id"))
            built = build_artifact(
                checkpoint.model,
                ids,
                blocks.write,
                model_name=name,
                on_progress=lambda done, total: show(Moment("computing", done, total, f"{done:,} of {total:,} tokens")),
            )
            root = encode_draft(built.manifest(NO_TERMS))
            cid = Cid.of_node(root)
            written = write_car(cid, root, blocks, path, show_steps(show), open_root)
            if draft is not None:
                write_pieces(draft.expanduser().absolute(), [root], len(root))
        document = {
            "draft": str(cid),
            "file": str(path),
            "draft_file": str(draft.expanduser().absolute()) if draft is not None else None,
            "tokens": len(ids),
            "blocks": written.blocks,
            "bytes": written.file_bytes,
            "dtype": dtype.value,
        }
        took = format_seconds(time.monotonic() - started)
        size = f"{plural(len(ids), 'token')}, {format_bytes(written.file_bytes)}, in {took}"
        output.result(document, fields([("draft", str(cid)), ("file", str(path)), ("size", size)]))
        output.note(f"Next: p2pkv sign {draft or out} --out FILE")


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Yield a folder on the disk of ``path`` for what is on its way into it. Those of builds that were killed are removed.

    Raises UsageError, StoreError.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", advice="Name a file to write, such as book.car.")
    prefix, suffix = f".{path.name}.", ".building"
    with os_errors(f"create a folder in {path.parent}"):
        clear_unlocked(path.parent, lambda name: name.startswith(prefix) and name.endswith(suffix))
        folder, lock = create_locked(path.parent, lambda: f"{prefix}{secrets.token_hex(8)}{suffix}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
