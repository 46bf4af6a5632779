"""CAR files of sample artifacts, and what is wrong with files that are none."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from p2pkv.artifact.build import ArtifactBuilder, Terms
from p2pkv.artifact.read import open_artifact
from p2pkv.formats.car import encode_header, encode_section
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import layer_bytes
from p2pkv.keys import segment_bounds
from p2pkv.store.progress import Progress, Step
from p2pkv.store.store import Store
from tests.support.artifacts import KEY, NOW, PUBLISHER, Sample, make_sample, model

Blocks = list[tuple[Cid, bytes]]


def in_order(sample: Sample) -> list[Cid]:
    """Return the CIDs of a whole artifact in the order of a file."""
    manifest = sample.artifact.manifest
    tokens = [manifest.tokens.cid] if manifest.tokens.cid is not None else []
    nodes = [sample.blocks[node] for node in manifest.segments]
    blocks = [ref.cid for index, node in enumerate(nodes) for ref in sample.artifact.open_segment(index, node).blocks()]
    return [*dict.fromkeys([sample.cid, *tokens, *manifest.segments, *blocks])]


def data_blocks(sample: Sample) -> list[Cid]:
    """Return the blocks of KV in the order of a file."""
    tokens = sample.artifact.manifest.tokens.cid
    return [cid for cid in in_order(sample) if cid.codec is Codec.RAW and cid != tokens]


def blocks_of(sample: Sample) -> Blocks:
    return [(cid, sample.blocks[cid]) for cid in in_order(sample)]


def car(roots: list[Cid], blocks: Blocks) -> bytes:
    return encode_header(roots) + b"".join(encode_section(cid, data) for cid, data in blocks)


def whole(sample: Sample) -> bytes:
    """Return the file that holds all of an artifact."""
    return car([sample.cid], blocks_of(sample))


def changed(sample: Sample, cid: Cid) -> bytes:
    """Return a file with one wrong byte in a block."""
    wrong = [(name, data[:-1] + bytes([data[-1] ^ 1]) if name == cid else data) for name, data in blocks_of(sample)]
    return car([sample.cid], wrong)


def without(sample: Sample, *cids: Cid) -> bytes:
    return car([sample.cid], [(name, data) for name, data in blocks_of(sample) if name not in cids])


def forged(sample: Sample) -> bytes:
    """Return a file whose envelope has no signature of its publisher."""
    data = replace(Envelope.decode(sample.blocks[sample.cid]), signature=bytes(64)).encode()
    return car([Cid.of_node(data)], [(Cid.of_node(data), data), *blocks_of(sample)[1:]])


def signed(sample: Sample, **changes: Any) -> bytes:
    """Return a file with another manifest over the same blocks, signed by its publisher."""
    data = Envelope.sign(replace(sample.artifact.manifest, **changes), KEY).encode()
    return car([Cid.of_node(data)], [(Cid.of_node(data), data), *blocks_of(sample)[1:]])


def long_sample(token_ids: list[int], *, created: int = NOW) -> Sample:
    """Return an artifact whose token ids are a block; the manifest alone does not open it."""
    blocks: dict[Cid, bytes] = {}
    description = model()
    builder = ArtifactBuilder(description, token_ids, lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    for start, end in pairwise(segment_bounds(len(token_ids))):
        builder.add_segment([bytes(layer_bytes(g, end - start, description.dtype)) for g in description.layers])
    envelope = Envelope.sign(builder.finish(Terms(PUBLISHER, sequence=1, created=created), {}), KEY)
    blocks[envelope.cid] = envelope.encode()
    tokens = envelope.open().tokens.cid
    assert tokens is not None
    return Sample(open_artifact(envelope.cid, blocks[envelope.cid], blocks[tokens]), blocks)


SAMPLE = make_sample([number % 500 for number in range(600)])
SIZE = sum(map(len, SAMPLE.blocks.values()))
# One more than a manifest holds inline: the token ids are in a block of their own.
LONG = long_sample([number % 500 for number in range(65_537)])


def hold(store: Store, sample: Sample, *, without: tuple[Cid, ...] = ()) -> None:
    """Store the blocks of an artifact, and list nothing."""
    for cid, data in sample.blocks.items():
        if cid not in without:
            store.write(cid, data)


class Left(Exception):
    """Raised by whoever listens, in the place of a kill."""


def after(count: int) -> Progress:
    """Return a listener that leaves when it has heard ``count`` times."""
    left = iter(range(count))

    def hear(step: Step, done: int, total: int) -> None:
        if next(left, None) is None:
            raise Left

    return hear


def assert_kept(store: Store) -> None:
    """Assert that nothing would be collected now."""
    assert store.collector.collect().blocks == 0
