"""Sample artifacts as files: an envelope beside nothing, or with all its blocks in a home."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.home import HomeLayout
from tests.support.artifacts import Sample


def store(home: Path, sample: Sample, *, without: Collection[Cid] = ()) -> None:
    """Put every block of ``sample`` but those of ``without`` into ``home``."""
    layout = HomeLayout(home)
    layout.create()
    with closing(BlockPacks(layout.blocks)) as blocks:
        for cid, data in sample.blocks.items():
            if cid not in without:
                blocks.write(cid, data)


def envelope_file(folder: Path, sample: Sample) -> Path:
    path = folder / "artifact.envelope"
    path.write_bytes(sample.blocks[sample.cid])
    return path
