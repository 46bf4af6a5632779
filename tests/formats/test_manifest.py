"""Manifests: every field checked, unknown ones kept, versions told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from p2pkv.errors import DagCborError, FormatError, ManifestError, TruncatedError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest, Tokens
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.limits import (
    MAX_HEAD_DIM,
    MAX_INLINE_TOKEN_BYTES,
    MAX_KV_HEADS,
    MAX_LAYERS,
    MAX_SEGMENTS,
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    SEGMENT_TOKENS,
)
from tests.support import samples, vectors
from tests.support.strategies import ascii_names, digests, dtypes, texts, token_sequences

GOLDEN = vectors.load("manifest.json")["tiny"]
SAMPLE: Any = dagcbor.decode(GOLDEN.data)
NODE_LINK = Cid.of_node(b"\xa0")
WRONG_KINDS: list[dagcbor.Value] = [None, True, 7, b"seven", "seven", [7], {"seven": 7}, Cid.of_block(b"seven")]
# Where each map of the node is found, by the name that errors give it.
PLACES: dict[str, Callable[[Any], Any]] = {
    "manifest": lambda node: node,
    "manifest.model": lambda node: node["model"],
    "manifest.layers[0]": lambda node: node["layers"][0],
    "manifest.tokens": lambda node: node["tokens"],
}
OPTIONAL = {
    "manifest": {"expires", "tokenizer"},
    "manifest.model": set(),
    "manifest.layers[0]": set(),
    "manifest.tokens": {"inline", "cid"},
}
FIELDS = [(place, name) for place, find in PLACES.items() for name in find(SAMPLE)]
REQUIRED = [(place, name) for place, name in FIELDS if name not in OPTIONAL[place]]


def tree() -> Any:
    """Return the sample as plain values, to be spoilt."""
    return copy.deepcopy(SAMPLE)


def decode_tree(node: Any) -> Manifest:
    return Manifest.decode(dagcbor.encode(node))


def test_golden_vector() -> None:
    assert samples.manifest().encode() == GOLDEN.data
    assert Manifest.decode(GOLDEN.data) == samples.manifest()


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    ids = draw(token_sequences(1, 600))
    encoded = b"".join(number.to_bytes(4, "little") for number in ids)
    inline, cid = draw(st.sampled_from([(encoded, None), (None, Cid.of_block(encoded)), (None, None)]))
    geometry = st.builds(
        LayerGeometry,
        st.just(LayerKind.FULL),
        st.integers(1, MAX_KV_HEADS),
        st.integers(1, MAX_HEAD_DIM),
        st.integers(1, MAX_HEAD_DIM),
    )
    count = -(-len(ids) // SEGMENT_TOKENS)
    link = st.builds(Cid, st.just(Codec.DAG_CBOR), st.sampled_from(HashFunction), digests)
    seconds = st.integers(0, dagcbor.MAX_INT)
    return Manifest(
        model_id=draw(digests),
        model_name=draw(texts),
        layers=tuple(draw(st.lists(geometry, min_size=1, max_size=5))),
        dtype=draw(dtypes),
        codec=draw(texts),
        tokens=Tokens(len(ids), digest(encoded), inline, cid),
        last_chain_key=draw(digests),
        segments=tuple(draw(st.lists(link, min_size=count, max_size=count))),
        publisher=samples.PUBLISHER,
        sequence=draw(seconds),
        created=draw(seconds),
        expires=draw(st.none() | seconds),
        licence=draw(texts),
        producer=draw(st.dictionaries(texts, texts, max_size=3)),
        tokenizer=draw(st.none() | digests),
        aliases=draw(st.dictionaries(texts, st.binary(max_size=40), max_size=3)),
        extra=draw(st.dictionaries(ascii_names.map("x-".__add__), st.integers(0, 9), max_size=2)),
    )


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(("place", "name"), REQUIRED)
def test_missing_field(place: str, name: str) -> None:
    node = tree()
    del PLACES[place](node)[name]
    with pytest.raises(ManifestError) as caught:
        decode_tree(node)
    assert caught.value.message == f"{place}.{name} is missing"


@pytest.mark.parametrize(("place", "name"), [field for field in FIELDS if field not in REQUIRED])
def test_a_missing_optional_field_is_as_good_as_null(place: str, name: str) -> None:
    node, with_null = tree(), tree()
    del PLACES[place](node)[name]
    PLACES[place](with_null)[name] = None
    assert decode_tree(node) == decode_tree(with_null)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (place, name, wrong)
        for place, name in FIELDS
        for wrong in WRONG_KINDS
        if type(wrong) is not type(PLACES[place](SAMPLE)[name]) or isinstance(wrong, list | dict)
        if not (wrong is None and (place, name) not in REQUIRED)
    ],
)
def test_wrong_kind(place: str, name: str, wrong: dagcbor.Value) -> None:
    node = tree()
    PLACES[place](node)[name] = wrong
    with pytest.raises(ManifestError):
        decode_tree(node)


SPOILT: dict[str, Callable[[Any], Any]] = {
    "another kind of node": lambda node: node.update(kind="p2pkv/segment"),
    "short model id": lambda node: node["model"].update(id=bytes(31)),
    "long model id": lambda node: node["model"].update(id=bytes(33)),
    "model name too long": lambda node: node["model"].update(name="x" * (MAX_TEXT_BYTES + 1)),
    "model name too long in bytes": lambda node: node["model"].update(name="é" * (MAX_TEXT_BYTES // 2 + 1)),
    "unknown field of the model": lambda node: node["model"].update(later=1),
    "no layers": lambda node: node.update(layers=[]),
    "too many layers": lambda node: node.update(layers=node["layers"][:1] * (MAX_LAYERS + 1)),
    "unknown kind of layer": lambda node: node["layers"][0].update(kind="mamba"),
    "unknown field of a layer": lambda node: node["layers"][1].update(later=1),
    "no heads": lambda node: node["layers"][0].update(kv_heads=0),
    "too many heads": lambda node: node["layers"][0].update(kv_heads=MAX_KV_HEADS + 1),
    "negative heads": lambda node: node["layers"][0].update(kv_heads=-1),
    "heads without values": lambda node: node["layers"][0].update(k_dim=0),
    "heads with too many values": lambda node: node["layers"][0].update(k_dim=MAX_HEAD_DIM + 1),
    "absurd heads": lambda node: node["layers"][0].update(v_dim=2**63 - 1),
    "unknown dtype": lambda node: node.update(dtype="fp8"),
    "no tokens": lambda node: (node["tokens"].update(count=0, inline=b""), node.update(segments=[])),
    "negative count of tokens": lambda node: node["tokens"].update(count=-1),
    "too many tokens": lambda node: node["tokens"].update(count=MAX_TOKENS + 1, inline=None),
    "inline ids of another count": lambda node: node["tokens"].update(count=4),
    "inline ids that end inside an id": lambda node: node["tokens"].update(inline=node["tokens"]["inline"][:-1]),
    "no inline ids": lambda node: node["tokens"].update(inline=b""),
    "too many inline ids": lambda node: (
        node["tokens"].update(count=MAX_INLINE_TOKEN_BYTES // 4 + 1, inline=bytes(MAX_INLINE_TOKEN_BYTES + 4)),
        node.update(segments=[NODE_LINK] * 257),
    ),
    "ids inline and by CID": lambda node: node["tokens"].update(cid=Cid.of_block(b"ids")),
    "ids in a node": lambda node: node["tokens"].update(inline=None, cid=NODE_LINK),
    "short digest of the ids": lambda node: node["tokens"].update(digest=bytes(31)),
    "unknown field of the tokens": lambda node: node["tokens"].update(later=1),
    "short chain key": lambda node: node.update(last_chain_key=bytes(31)),
    "no segments": lambda node: node.update(segments=[]),
    "a segment too many": lambda node: node.update(segments=[NODE_LINK] * 2),
    "far too many segments": lambda node: node.update(segments=[NODE_LINK] * (MAX_SEGMENTS + 2)),
    "a segment that is a block": lambda node: node.update(segments=[Cid.of_block(b"x")]),
    "a segment that is no link": lambda node: node.update(segments=[b"x"]),
    "negative sequence number": lambda node: node.update(sequence=-1),
    "made before the epoch": lambda node: node.update(created=-1),
    "expired before the epoch": lambda node: node.update(expires=-1),
    "licence too long": lambda node: node.update(licence="x" * (MAX_TEXT_BYTES + 1)),
    "producer holds a number": lambda node: node["producer"].update(threads=2),
    "producer holds too long a text": lambda node: node["producer"].update(notes="x" * (MAX_TEXT_BYTES + 1)),
    "short digest of the tokenizer": lambda node: node.update(tokenizer=bytes(31)),
    "alias that is text": lambda node: node["aliases"].update(vllm="x"),
    "alias too long": lambda node: node["aliases"].update(vllm=bytes(MAX_TEXT_BYTES + 1)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_node(name: str) -> None:
    node = tree()
    SPOILT[name](node)
    with pytest.raises(ManifestError):
        decode_tree(node)


@pytest.mark.parametrize("publisher", ["", "did:web:example.org", samples.PUBLISHER[:-1], "x" * MAX_TEXT_BYTES])
def test_a_publisher_that_is_no_key(publisher: str) -> None:
    with pytest.raises(FormatError, match="did:key"):
        decode_tree(tree() | {"publisher": publisher})


def test_an_unknown_kind_of_layer_is_refused_by_its_name() -> None:
    node = tree()
    node["layers"][1]["kind"] = "mamba"
    with pytest.raises(ManifestError, match=r"layers\[1\].kind is 'mamba'"):
        decode_tree(node)


@pytest.mark.parametrize(
    ("count", "segments"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3), (MAX_TOKENS, MAX_SEGMENTS)]
)
def test_segments_have_to_be_as_many_as_the_tokens_take(count: int, segments: int) -> None:
    node = tree()
    node["tokens"].update(count=count, inline=None)
    node["segments"] = [NODE_LINK] * segments
    assert len(decode_tree(node).segments) == segments
    for wrong in (segments - 1, segments + 1):
        node["segments"] = [NODE_LINK] * wrong
        with pytest.raises(ManifestError):
            decode_tree(node)


@pytest.mark.parametrize("version", [0, 2, 2**63 - 1])
def test_unknown_version_is_told_before_anything_else(version: int) -> None:
    with pytest.raises(UnknownVersionError, match=f"version {version}"):
        decode_tree({"kind": "p2pkv/manifest", "version": version, "other": "fields"})


def test_unknown_fields_are_kept() -> None:
    node = tree() | {"later": {"depth": [1, NODE_LINK]}}
    manifest = decode_tree(node)
    assert manifest.extra == {"later": {"depth": [1, NODE_LINK]}}
    assert manifest.encode() == dagcbor.encode(node)


def test_a_later_field_never_replaces_a_known_one() -> None:
    assert samples.manifest(extra={"sequence": 99}).encode() == samples.manifest().encode()


def test_errors_stay_short_whatever_the_publisher_writes() -> None:
    long = "x" * MAX_TEXT_BYTES
    for node in (
        tree() | {"kind": long},
        tree() | {"dtype": long},
        tree() | {"publisher": long},
        tree() | {"producer": {long: 1}},
        tree() | {"model": {**SAMPLE["model"], long: 1}},
    ):
        with pytest.raises(FormatError) as caught:
            decode_tree(node)
        assert len(str(caught.value)) < 400


def test_cut_and_trailing_bytes() -> None:
    for cut in range(len(GOLDEN.data)):
        with pytest.raises(TruncatedError):
            Manifest.decode(GOLDEN.data[:cut])
    with pytest.raises(DagCborError):
        Manifest.decode(GOLDEN.data + b"\x00")


@given(st.binary(max_size=64))
def test_garbage(data: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(data)


@given(st.integers(0, 8 * len(GOLDEN.data) - 1))
def test_a_flipped_bit_is_refused_or_another_manifest(position: int) -> None:
    changed = bytearray(GOLDEN.data)
    changed[position // 8] ^= 1 << position % 8
    try:
        manifest = Manifest.decode(bytes(changed))
    except FormatError:
        return
    assert manifest != samples.manifest()


def test_sealed_segment_keys_are_there_or_left_out_and_never_null() -> None:
    """A public manifest has one form; null would be written back as another."""
    with pytest.raises(ManifestError, match="segment_keys is not a byte string"):
        decode_tree({**tree(), "segment_keys": None})
