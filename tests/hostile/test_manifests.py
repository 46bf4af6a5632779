"""Attacks by publishers, who may sign anything: manifests and segment nodes that do not fit, or claim the absurd."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import cbor2
import pytest

from p2pkv import keys
from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import DagCborError, FormatError, IntegrityError, ManifestError, P2pkvError, TruncatedError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest, Tokens
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_parts
from p2pkv.limits import MAX_BLOCKS_PER_LAYER, MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_SEGMENTS, MAX_TOKENS
from tests.hostile.attack import MEMORY_BYTES, Attack, assert_refused
from tests.hostile.nodes import ABSURD, BEYOND, Change, changed, put
from tests.support import samples
from tests.support.artifacts import make_sample
from tests.support.cbor import encoded

# Two whole segments and a tail.
SAMPLE = make_sample(range(1000, 1600))
MANIFEST = dagcbor.decode_map(SAMPLE.artifact.manifest.encode())
NODES = [SAMPLE.blocks[cid] for cid in SAMPLE.artifact.manifest.segments]


def open_it(data: bytes) -> Artifact:
    return open_manifest(SAMPLE.cid, Manifest.decode(data))


def open_in_place(node: bytes, index: int = 1) -> Segment:
    """Open a node, whose hash the publisher signed, in its place in the artifact."""
    links = list(SAMPLE.artifact.manifest.segments)
    links[index] = Cid.of_node(node)
    manifest = replace(SAMPLE.artifact.manifest, segments=tuple(links))
    return replace(SAMPLE.artifact, manifest=manifest).open_segment(index, node)


def block(**fields: Any) -> Change:
    return lambda node: node["layers"][0][0].update(fields)


OTHER = Cid.of_node(b"\xa0")
LINKS = list(MANIFEST["segments"]) if isinstance(MANIFEST["segments"], list) else []

OF_MANIFESTS: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{
        f"{path[-1]} of {number}": (put(*path, value=number), ManifestError)
        for path in (("tokens", "count"), ("layers", 0, "kv_heads"), ("layers", 1, "k_dim"), ("layers", 0, "v_dim"))
        for number in ABSURD
    },
    **{
        f"{path[-1]} of {number}": (put(*path, value=number), DagCborError)
        for path in (("tokens", "count"), ("layers", 0, "kv_heads"), ("sequence",), ("created",), ("expires",), ("version",))
        for number in BEYOND
    },
    **{
        f"{name} of {number}": (put(name, value=number), ManifestError)
        for name in ("sequence", "created", "expires")
        for number in (-1, -(2**63))
    },
    "a count that is true": (put("tokens", "count", value=True), ManifestError),
    "a count of 599": (put("tokens", "count", value=599), ManifestError),
    "a count of 601": (put("tokens", "count", value=601), ManifestError),
    "a count of as many tokens as there may be": (put("tokens", "count", value=MAX_TOKENS), ManifestError),
    "as many heads as there may be and one": (put("layers", 0, "kv_heads", value=MAX_KV_HEADS + 1), ManifestError),
    "a head larger than any": (put("layers", 0, "k_dim", value=MAX_HEAD_DIM + 1), ManifestError),
    "more layers than any": (lambda node: node.update(layers=node["layers"] * MAX_LAYERS), ManifestError),
    "as many segments as a node holds": (lambda node: node.update(segments=[OTHER] * 25_000), ManifestError),
    "a segment too few": (lambda node: node["segments"].pop(), ManifestError),
    "a segment too many": (lambda node: node["segments"].append(OTHER), ManifestError),
    "one segment for all places": (put("segments", value=LINKS[:1] * 3), ManifestError),
    "a segment that is a block": (put("segments", 1, value=Cid.of_block(b"x")), ManifestError),
    "a segment that is a map": (put("segments", 1, value={}), ManifestError),
    "token ids of another text": (put("tokens", "inline", value=bytes(2400)), ManifestError),
    "token ids of another text with their digest": (
        lambda node: node["tokens"].update(inline=bytes(2400), digest=digest(bytes(2400))),
        ManifestError,
    ),
    "token ids inline and elsewhere": (put("tokens", "cid", value=Cid.of_block(b"x")), ManifestError),
    "token ids in a node": (lambda node: node["tokens"].update(inline=None, cid=OTHER), ManifestError),
    "no token ids": (put("tokens", "inline", value=None), ManifestError),
    "another model": (put("model", "id", value=bytes(32)), ManifestError),
    "another last chain key": (put("last_chain_key", value=bytes(32)), ManifestError),
    "a codec that nobody has": (put("codec", value="\x1b[2J" * 1000), FormatError),
    "a publisher that is nobody": (put("publisher", value="did:key:" + "z" * 60_000), FormatError),
}  # fmt: skip

SECOND = dagcbor.decode_map(NODES[1])
HEADS: tuple[list[Any], ...] = (
    [0, 0], [1, 0], [-1, 1], [0, 2**63 - 1], [-(2**63), 1], [0], [0, 1, 2], [], [True, 1], [None, 1],
)  # fmt: skip
OF_NODES: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{f"start of {number}": (put("start", value=number), FormatError) for number in ABSURD if number != 0},
    **{f"end of {number}": (put("end", value=number), FormatError) for number in ABSURD},
    **{f"{name} of {number}": (put(name, value=number), DagCborError) for name in ("start", "end") for number in BEYOND},
    **{f"size of {number}": (block(size=number), FormatError) for number in ABSURD},
    **{f"raw size of {number}": (block(raw_size=number), FormatError) for number in ABSURD},
    **{f"heads of {heads}": (block(heads=heads), FormatError) for heads in HEADS},
    "the place of the segment before it": (lambda node: node.update(start=0, end=256), ManifestError),
    "a place that overlaps the one before it": (lambda node: node.update(start=255, end=511), FormatError),
    "a place that leaves tokens out": (lambda node: node.update(end=511), ManifestError),
    "a place that reaches into the next": (lambda node: node.update(end=513), FormatError),
    "the text of another place": (put("chain_key", value=SAMPLE.artifact.chain_keys[0]), ManifestError),
    "another dtype": (put("dtype", value="fp32"), ManifestError),
    "another codec": (put("codec", value="zstd"), ManifestError),
    "no layers": (put("layers", value=[]), ManifestError),
    "a layer too few": (lambda node: node["layers"].pop(), ManifestError),
    "a layer too many": (lambda node: node["layers"].append(node["layers"][0]), ManifestError),
    "a layer without blocks": (put("layers", 0, value=[]), FormatError),
    "a block twice": (lambda node: node["layers"][0].append(node["layers"][0][0]), ManifestError),
    "more blocks than any layer": (put("layers", 0, value=[{}] * (MAX_BLOCKS_PER_LAYER + 1)), FormatError),
    "more layers than any": (lambda node: node.update(layers=[[]] * (MAX_LAYERS + 1)), FormatError),
    "K alone": (block(part="k", raw_size=4096, size=4096), ManifestError),
    "K and V, and K once more": (lambda node: node["layers"][0].append({**node["layers"][0][0], "part": "k"}), ManifestError),
    "a head that no layer has": (block(heads=[0, 2]), ManifestError),
    "a size that is not that of the shape": (block(size=8191, raw_size=8191), ManifestError),
    "a raw block that is said to shrink": (block(size=8000), ManifestError),
    "a raw block that is said to be another once decoded": (block(digest=bytes(32)), ManifestError),
    "a block that is a node": (block(cid=OTHER), FormatError),
    "an unknown field of a block": (block(later=1), FormatError),
}  # fmt: skip


def filled(node: Any, name: str, empty: bytes, head: int, item: bytes) -> bytes:
    """Return a node in which the field ``name``, ``empty`` otherwise, holds a million times ``item``."""
    key = dagcbor.encode(name)
    data = encoded({**node, name: cbor2.loads(empty)})
    assert key + empty in data
    return data.replace(key + empty, key + bytes((head,)) + MILLION.to_bytes(4, "big") + item * MILLION)


MILLION = 1_000_000
LINK = dagcbor.encode(OTHER)
# The field of a node that holds a million of one item: the head of an empty list or map, that of a full one, the item.
MILLIONS: dict[str, tuple[Any, str, bytes, int, bytes]] = {
    "manifest: a million segments": (MANIFEST, "segments", b"\x80", 0x9A, LINK),
    "manifest: a million integers as segments": (MANIFEST, "segments", b"\x80", 0x9A, b"\0"),
    "manifest: a million layers": (MANIFEST, "layers", b"\x80", 0x9A, b"\xa0"),
    "manifest: a million producers": (MANIFEST, "producer", b"\xa0", 0xBA, b"\x60\x60"),
    "node: a million layers": (SECOND, "layers", b"\x80", 0x9A, b"\x80"),
}
ATTACKS = [
    *(
        Attack(f"manifest: {name}", open_it, error, partial(changed, MANIFEST, change))
        for name, (change, error) in OF_MANIFESTS.items()
    ),
    *(
        Attack(f"node: {name}", open_in_place, error, partial(changed, SECOND, change))
        for name, (change, error) in OF_NODES.items()
    ),
    *(
        Attack(name, open_in_place if name.startswith("node") else open_it, DagCborError, partial(filled, *how))
        for name, how in MILLIONS.items()
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_what_the_attacks_change_is_good() -> None:
    assert open_it(changed(MANIFEST, lambda node: None)).token_ids == SAMPLE.artifact.token_ids
    for index, node in enumerate(NODES):
        assert open_in_place(changed(dagcbor.decode_map(node), lambda node: None), index).start == 256 * index


# --- links that lead in circles --------------------------------------------------------------------------------------------


def in_the_place_of_a_segment(node: bytes) -> Attack:
    manifest = replace(samples.manifest(), segments=(Cid.of_node(node),))
    artifact = open_manifest(SAMPLE.cid, manifest)
    return Attack("", lambda: artifact.open_segment(0, node), FormatError)


@pytest.mark.parametrize("node", [samples.envelope().encode(), samples.manifest().encode()], ids=["envelope", "manifest"])
def test_a_link_back_up_leads_nowhere(node: bytes) -> None:
    """No node holds its own hash, so a circle needs a link whose target is of another kind than its place: there it ends."""
    assert_refused(in_the_place_of_a_segment(node))


def test_a_chain_of_nodes_is_three_long() -> None:
    """Envelope, node, block: each kind leads to the next one alone, and a block is never read as a node."""
    inner = dagcbor.decode_map(samples.segment().encode())
    assert_refused(in_the_place_of_a_segment(dagcbor.encode({**inner, "layers": [[[]]]})))
    deeper = copy.deepcopy(inner)
    layers: Any = deeper["layers"]
    layers[0][0]["cid"] = Cid(Codec.DAG_CBOR, HashFunction.BLAKE3, layers[0][0]["cid"].digest)
    assert_refused(in_the_place_of_a_segment(dagcbor.encode(deeper)))


def test_links_of_a_later_version_are_kept_and_not_followed() -> None:
    """Nobody resolves them, so a circle through them costs nothing; only what this version names is fetched or stored."""
    later: list[dagcbor.Value] = [OTHER] * 1000
    node = samples.segment(extra={"later": later}).encode()
    manifest = replace(samples.manifest(), segments=(Cid.of_node(node),), extra={"later": SAMPLE.cid})
    segment = open_manifest(SAMPLE.cid, manifest).open_segment(0, node)
    assert {ref.cid for ref in segment.blocks()} == {Cid.of_block(data) for data in samples.BLOCKS}


# --- what is small, and makes others large ---------------------------------------------------------------------------------


def test_what_is_remembered_of_absurd_geometries_is_bounded() -> None:
    """A manifest of 60 KB names 1,024 shapes of layers, each with a block for every head of K and of V."""
    tracemalloc.start()
    try:
        parts = layer_parts(LayerGeometry(LayerKind.FULL, MAX_KV_HEADS, 513, 1024), 256, Dtype.FP32)
        each = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(parts) == 2 * MAX_KV_HEADS
    remembered = layer_parts.cache_info().maxsize
    assert remembered is not None
    assert remembered * each < MEMORY_BYTES


def test_a_head_that_fits_no_block() -> None:
    geometry = LayerGeometry(LayerKind.FULL, MAX_KV_HEADS, MAX_HEAD_DIM, MAX_HEAD_DIM)
    assert_refused(Attack("", lambda: layer_parts(geometry, 256, Dtype.FP32), ManifestError))


def test_the_longest_text_is_opened_within_the_bounds() -> None:
    """The most work that a manifest of a few kilobytes can cause: 262,144 token ids in a block of their own."""
    ids = keys.encode_tokens([7] * MAX_TOKENS)
    chain = keys.chain(samples.MODEL_ID, [7] * MAX_TOKENS)
    links = tuple(Cid.of_node(number.to_bytes(4, "big")) for number in range(MAX_SEGMENTS))
    manifest = samples.manifest(tokens=Tokens(MAX_TOKENS, digest(ids), None, Cid.of_block(ids)), segments=links)
    data = replace(manifest, last_chain_key=chain.last).encode()

    def open_and_change_one() -> None:
        decoded = Manifest.decode(data)
        open_manifest(SAMPLE.cid, decoded, ids)
        open_manifest(SAMPLE.cid, decoded, ids[:-4] + b"\x08\0\0\0")

    assert_refused(Attack("", open_and_change_one, ManifestError))


def test_nodes_and_manifests_that_are_cut_off_anywhere() -> None:
    for data, decode in ((SAMPLE.artifact.manifest.encode(), Manifest.decode), (NODES[0], Segment.decode)):
        for end in range(0, len(data), 7):
            with pytest.raises(TruncatedError):
                decode(data[:end])


def test_another_node_than_the_one_that_was_signed() -> None:
    for index, node in enumerate((NODES[1], NODES[0], NODES[2][:-1])):
        assert_refused(Attack("", lambda index=index, node=node: SAMPLE.artifact.open_segment(index, node), IntegrityError))
