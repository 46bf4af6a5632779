"""Model ids, chain keys and DHT keys, against BLAKE3 and ``struct`` alone."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import example, given, strategies as st

from p2pkv import keys
from p2pkv.connectors.hf.config import describe_config
from p2pkv.connectors.hf.weights import digest_tensors
from p2pkv.errors import FormatError, UsageError
from p2pkv.formats import dagcbor
from p2pkv.formats.hashing import digest, domain_hash
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_TOKENS, SEGMENT_TOKENS
from tests.support import samples, vectors
from tests.support.strategies import digests, token_sequences

VECTORS = vectors.load("keys.json")
ROOT = Path(__file__).parents[2]
# Long enough for three segments and a tail, short enough to be drawn often.
sequences = token_sequences(0, 900)


def by_hand(domain: bytes, *parts: bytes) -> bytes:
    """Return the domain-separated hash without any code of p2pkv."""
    return blake3(b"".join(struct.pack("<Q", len(part)) + part for part in (domain, *parts))).digest()


# --- hashing -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_domain_hash_by_hand(parts: list[bytes]) -> None:
    assert domain_hash("p2pkv/test/v1", *parts) == by_hand(b"p2pkv/test/v1", *parts)
    assert domain_hash("p2pkv/test/v1", *[memoryview(part) for part in parts]) == by_hand(b"p2pkv/test/v1", *parts)


@given(st.lists(st.binary(max_size=4), max_size=3), st.lists(st.binary(max_size=4), max_size=3))
@example([b"ab", b"c"], [b"a", b"bc"])
@example([b""], [])
def test_the_split_into_parts_is_hashed(left: list[bytes], right: list[bytes]) -> None:
    assert (domain_hash("d", *left) == domain_hash("d", *right)) == (left == right)


def test_plain_digest_is_that_of_the_first_published_vector() -> None:
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


# --- golden vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_golden_digest_is_that_of_its_preimage(name: str) -> None:
    assert blake3(VECTORS[name].data).hexdigest() == VECTORS[name].fields["digest"]


def test_golden_keys() -> None:
    def golden(name: str) -> bytes:
        return bytes.fromhex(VECTORS[name].fields["digest"])

    model = VECTORS["model id"].fields
    dtype = Dtype(model["dtype"])
    weights = bytes.fromhex(model["weights"])
    model_id = keys.model_id(keys.canonical_config(model["config"]), weights, compute_dtype=dtype, kv_dtype=dtype)
    assert model_id == golden("model id")

    short = keys.chain(model_id, VECTORS["tail of a short text"].fields["tokens"])
    assert short.keys == (golden("chain root"),)
    assert short.tail == short.last == golden("tail of a short text")
    long = keys.chain(model_id, [*range(256), 7, 8])
    assert list(long) == [golden("first segment"), golden("tail behind a segment")]
    assert keys.chain(model_id, [], namespace=b"secret").keys == (golden("chain root, private"),)
    assert keys.dht_key(short.last) == bytes.fromhex(VECTORS["dht key"].fields["multihash"])
    public_key = bytes(samples.KEY.verify_key)
    assert keys.publisher_key(public_key) == bytes.fromhex(VECTORS["publisher key"].fields["multihash"])


def test_golden_parts_of_a_model_id() -> None:
    golden = vectors.load("model-id.json")
    tensors = [
        (name, dtype, tuple(shape), blake3(bytes.fromhex(data)).digest())
        for name, dtype, shape, data in golden["weights digest"].fields["tensors"]
    ]
    assert blake3(golden["weights digest"].data).hexdigest() == golden["weights digest"].fields["digest"]
    for order in (tensors, tensors[::-1]):
        assert digest_tensors(order).hex() == golden["weights digest"].fields["digest"]
    assert dagcbor.encode(describe_config(golden["config description"].fields["config"])) == golden["config description"].data


# --- model id ----------------------------------------------------------------------------------------------------------


def test_everything_that_changes_values_changes_the_model_id() -> None:
    config: dict[str, dagcbor.Value] = {"heads": 2, "rope": {"theta": 10000}}
    weights = digest(b"weights")
    ids = {
        keys.model_id(config, weights, compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16),
        keys.model_id(config | {"heads": 3}, weights, compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16),
        keys.model_id(config, digest(b"others"), compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16),
        keys.model_id(config, weights, compute_dtype=Dtype.FP32, kv_dtype=Dtype.BF16),
        keys.model_id(config, weights, compute_dtype=Dtype.BF16, kv_dtype=Dtype.FP32),
        keys.model_id(config, weights, compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16, adapters=[b"a", b"b"]),
        keys.model_id(config, weights, compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16, adapters=[b"b", b"a"]),
    }
    assert len(ids) == 7


def test_the_order_of_config_entries_does_not_matter() -> None:
    def of(config: dict[str, dagcbor.Value]) -> bytes:
        return keys.model_id(config, bytes(32), compute_dtype=Dtype.BF16, kv_dtype=Dtype.BF16)

    assert of({"a": 1, "b": {"c": 2, "d": 3}}) == of({"b": {"d": 3, "c": 2}, "a": 1})


@pytest.mark.parametrize(
    ("number", "canonical"),
    [
        (10000, 10000),
        (10000.0, 10000),
        (0, 0),
        (-0.0, 0),
        (-3.0, -3),
        (1e-05, "1e-05"),
        (0.1, "0.1"),
        (2**53 + 1, 2**53 + 1),
        (2.0**62, 2**62),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (-(2.0**63), -(2**63)),
        (2**63, "0x8000000000000000"),
        (2.0**63, "0x8000000000000000"),
        (-(2**63) - 1, "-0x8000000000000001"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (10**5000, hex(10**5000)),
        (1e308, hex(int(1e308))),
    ],
    ids=lambda value: hex(value)[:24] if isinstance(value, int) else repr(value)[:24],
)
def test_canonical_number(number: float, canonical: dagcbor.Value) -> None:
    assert keys.canonical_number(number) == canonical
    assert type(keys.canonical_number(number)) is type(canonical)


numbers = st.integers() | st.floats(allow_nan=False) | st.integers(2**53 - 2, 2**53 + 2) | st.integers(2**63 - 2, 2**63 + 2)


@given(numbers, numbers)
@example(2**53, 2**53 + 1)
@example(2**63, 2.0**63)
def test_canonical_numbers_are_equal_where_the_numbers_are(left: float, right: float) -> None:
    assert (keys.canonical_number(left) == keys.canonical_number(right)) == (left == right)
    assert keys.canonical_number(left) == keys.canonical_number(left)
    dagcbor.encode(keys.canonical_number(left))


json_like = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("abc", max_size=3), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", max_size=3), json_like, max_size=3))
def test_every_json_config_can_be_encoded(config: dict[str, Any]) -> None:
    canonical = keys.canonical_config(config)
    assert dagcbor.decode(dagcbor.encode(canonical)) == canonical
    assert keys.canonical_config(canonical) == canonical


def test_booleans_are_no_numbers_and_tuples_are_lists() -> None:
    canonical = keys.canonical_config({"tie": True, "sections": (16, 24.0), "scale": None})
    assert canonical == {"tie": True, "sections": [16, 24], "scale": None}
    assert canonical["tie"] is True


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), [object()], {"a": {"b": 1j}}], ids=range(5))
def test_a_config_that_is_not_json(value: object) -> None:
    with pytest.raises(UsageError, match="not JSON"):
        keys.canonical_config({"key": value})


# --- tokens ------------------------------------------------------------------------------------------------------------


@given(sequences)
def test_tokens_round_trip(ids: list[int]) -> None:
    encoded = keys.encode_tokens(ids)
    assert encoded == struct.pack(f"<{len(ids)}I", *ids)
    assert keys.decode_tokens(encoded) == ids
    assert keys.encode_tokens(tuple(ids)) == encoded


def test_any_sequence_of_integers_is_taken_by_value() -> None:
    expected = keys.encode_tokens([1, 2, 3])
    assert keys.encode_tokens(bytes((1, 2, 3))) == expected
    assert keys.encode_tokens(array("q", (1, 2, 3))) == expected
    assert keys.encode_tokens(range(1, 4)) == expected


@pytest.mark.parametrize("wrong", [[-1], [2**32], [2**64], [1.5], ["1"], [None], [[1]]], ids=repr)
def test_what_is_no_token_id(wrong: list[Any]) -> None:
    with pytest.raises(UsageError, match="token ids"):
        keys.encode_tokens([1, *wrong])


def test_too_many_tokens() -> None:
    assert len(keys.encode_tokens(range(MAX_TOKENS))) == 4 * MAX_TOKENS
    with pytest.raises(UsageError, match="exceed"):
        keys.encode_tokens(range(MAX_TOKENS + 1))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 1023])
def test_bytes_that_end_inside_a_token(length: int) -> None:
    with pytest.raises(FormatError):
        keys.decode_tokens(bytes(length))


# --- chain -------------------------------------------------------------------------------------------------------------


@given(digests, sequences, st.binary(max_size=8))
def test_chain_by_hand(model: bytes, ids: list[int], namespace: bytes) -> None:
    expected = [by_hand(b"p2pkv/chain-root/v1", model, namespace)]
    for start in range(0, len(ids), 256):
        tokens = ids[start : start + 256]
        expected.append(by_hand(b"p2pkv/chain/v1", expected[-1], struct.pack(f"<{len(tokens)}I", *tokens)))
    chain = keys.chain(model, ids, namespace=namespace)
    assert list(chain) == expected[1:]
    assert chain.last == expected[-1]
    assert chain.token_count == len(ids)
    assert chain.segments == len(ids) // 256
    assert (chain.tail is None) == (len(ids) % 256 == 0)


@given(sequences, st.data())
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    whole, prefix = keys.chain(samples.MODEL_ID, ids), keys.chain(samples.MODEL_ID, ids[:cut])
    assert whole.keys[: len(prefix.keys)] == prefix.keys
    if cut % SEGMENT_TOKENS and cut < len(ids):
        assert prefix.tail not in {*whole}


@given(sequences.filter(bool), st.data())
def test_a_changed_token_changes_every_key_from_its_segment_on(ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[position] ^= 1
    before, after = list(keys.chain(samples.MODEL_ID, ids)), list(keys.chain(samples.MODEL_ID, changed))
    segment = position // SEGMENT_TOKENS
    assert before[:segment] == after[:segment]
    assert all(left != right for left, right in zip(before[segment:], after[segment:], strict=True))


def test_model_and_namespace_separate_chains() -> None:
    ids = list(range(300))
    chains = [
        keys.chain(samples.MODEL_ID, ids),
        keys.chain(digest(b"another model"), ids),
        keys.chain(samples.MODEL_ID, ids, namespace=b"secret"),
        keys.chain(samples.MODEL_ID, ids, namespace=b"secret\x00"),
    ]
    every = [key for chain in chains for key in (*chain.keys, chain.tail)]
    assert len(set(every)) == len(every) == 12
    assert keys.chain(samples.MODEL_ID, ids, namespace=b"") == chains[0]


def test_an_empty_text_has_its_root_alone() -> None:
    chain = keys.chain(samples.MODEL_ID, [])
    assert list(chain) == []
    assert chain.last == chain.keys[0]
    assert chain.tail is None


@pytest.mark.parametrize(
    ("count", "bounds"),
    [(0, [0]), (1, [0, 1]), (255, [0, 255]), (256, [0, 256]), (257, [0, 256, 257]), (512, [0, 256, 512])],
)
def test_segment_bounds(count: int, bounds: list[int]) -> None:
    assert keys.segment_bounds(count) == bounds


@given(digests)
def test_dht_key_by_hand(chain_key: bytes) -> None:
    key = keys.dht_key(chain_key)
    assert key == b"\x1e\x20" + by_hand(b"p2pkv/dht/v1", chain_key)
    assert chain_key not in key


# --- processes ---------------------------------------------------------------------------------------------------------

PRINT_NAMES = """
from p2pkv import keys
from tests.support import samples
print(samples.MODEL_ID.hex(), keys.dht_key(keys.chain(samples.MODEL_ID, range(300)).last).hex(), samples.envelope().cid)
"""


def test_names_are_equal_in_processes_with_other_hash_seeds() -> None:
    printed = set()
    for seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_NAMES], cwd=ROOT, env=environment, check=True, capture_output=True, timeout=30
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert printed.pop().split()[-1].decode() == str(samples.envelope().cid)
