"""Sample artifacts as files: an envelope beside nothing, or with all its blocks in a home."""

from __future__ import annotations

from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.store.blocks import BlockFiles
from p2pkv.store.home import HomeLayout
from tests.support.artifacts import Sample


def store(home: Path, sample: Sample) -> BlockFiles:
    """Put every block of ``sample`` into ``home``."""
    layout = HomeLayout(home)
    layout.create()
    blocks = BlockFiles(layout.blocks)
    for cid, data in sample.blocks.items():
        blocks.write(cid, data)
    return blocks


def damage(blocks: BlockFiles, cid: Cid, at: int = 0) -> None:
    """Flip one bit of a stored block."""
    path = Path(blocks.path(cid))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def envelope_file(folder: Path, sample: Sample) -> Path:
    path = folder / "artifact.envelope"
    path.write_bytes(sample.blocks[sample.cid])
    return path


def data_blocks(sample: Sample) -> list[Cid]:
    """Return the blocks of ``sample`` that hold KV, in order."""
    return [
        ref.cid
        for index, node in enumerate(sample.artifact.manifest.segments)
        for ref in sample.artifact.open_segment(index, sample.blocks[node]).blocks()
    ]
