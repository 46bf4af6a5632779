"""Hypothesis strategies that several test files share."""

from __future__ import annotations

import string
import struct
from typing import Any

from hypothesis import strategies as st

from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.dagcbor import MAX_INT, MIN_INT, Value
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.limits import MAX_HEAD_DIM, MAX_KV_HEADS, SEGMENT_TOKENS

digests = st.binary(min_size=32, max_size=32)
cids = st.builds(Cid, st.sampled_from(Codec), st.sampled_from(HashFunction), digests)

# Every text that UTF-8 can say: all but surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
integers = st.integers(MIN_INT, MAX_INT)
scalars: st.SearchStrategy[Value] = st.none() | st.booleans() | integers | st.binary(max_size=40) | texts | cids


def _containers(children: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    lists: st.SearchStrategy[Any] = st.lists(children, max_size=6)
    maps: st.SearchStrategy[Any] = st.dictionaries(texts, children, max_size=6)
    return lists | maps


values: st.SearchStrategy[Value] = st.recursive(scalars, _containers, max_leaves=20)
"""Values of the strict DAG-CBOR profile."""


def token_sequences(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Return texts of ``least`` to ``most`` token ids, drawn as bytes, which is fast."""
    raw = st.integers(least, most).flatmap(lambda length: st.binary(min_size=4 * length, max_size=4 * length))
    return raw.map(lambda data: list(struct.unpack(f"<{len(data) // 4}I", data)))


dtypes = st.sampled_from(Dtype)
segment_lengths = st.integers(1, SEGMENT_TOKENS)
geometries = st.builds(
    LayerGeometry,
    st.just(LayerKind.FULL),
    st.integers(1, MAX_KV_HEADS),
    # One head of 256 tokens and 512 values fits a block in every dtype, one of 8,192 in none.
    st.integers(1, 512) | st.integers(1, MAX_HEAD_DIM),
    st.integers(1, 512) | st.integers(1, MAX_HEAD_DIM),
)
ascii_names = st.text(string.ascii_lowercase, min_size=1, max_size=12)
