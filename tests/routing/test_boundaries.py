"""Where artifacts are announced and looked up: an artifact and a prompt that share a prefix meet under some key."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.formats.cid import Cid
from p2pkv.keys import Chain, chain, dht_key
from p2pkv.limits import MAX_QUERY_KEYS, MAX_SEGMENTS, MAX_TOKENS, SEGMENT_TOKENS
from p2pkv.routing.boundaries import announce_keys, boundaries, lookup_keys, query_keys

MODEL = b"\x01" * 32
MANIFEST = Cid.of_node(b"\xa0")


def text(count: int, *, ending: int = 0) -> list[int]:
    """The first ``count`` tokens of one text; the last ``ending`` of them are of another."""
    return [*range(count - ending), *range(1_000_000, 1_000_000 + ending)]


def announced(count: int) -> list[bytes]:
    return announce_keys(MANIFEST, count, list(chain(MODEL, text(count))))


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        (0, []),
        (1, [1]),
        (2, [2, 1]),
        (3, [3, 2, 1]),
        (8, [8, 4, 2, 1]),
        (15, [15, 8, 4, 2, 1]),
        (1024, [1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
    ],
)
def test_boundaries(segments: int, expected: list[int]) -> None:
    assert boundaries(segments) == expected


@given(st.integers(1, MAX_SEGMENTS))
def test_a_text_has_logarithmically_many_boundaries(segments: int) -> None:
    lengths = boundaries(segments)
    assert lengths[0] == segments
    assert lengths[-1] == 1
    assert len(lengths) <= segments.bit_length() + 1


def test_an_artifact_is_announced_by_manifest_tail_and_boundaries() -> None:
    keys = chain(MODEL, text(3 * SEGMENT_TOKENS + 7))
    assert keys.tail is not None
    expected = [keys.tail, keys.keys[3], keys.keys[2], keys.keys[1]]
    assert announced(3 * SEGMENT_TOKENS + 7) == [MANIFEST.multihash, *map(dht_key, expected)]


def test_an_artifact_without_a_tail_and_one_that_is_all_tail() -> None:
    whole, short = chain(MODEL, text(SEGMENT_TOKENS)), chain(MODEL, text(9))
    assert announced(SEGMENT_TOKENS) == [MANIFEST.multihash, dht_key(whole.keys[1])]
    assert announced(9) == [MANIFEST.multihash, dht_key(short.last)]


def test_every_key_is_a_multihash_and_none_is_a_chain_key() -> None:
    keys = announced(5 * SEGMENT_TOKENS + 1)
    assert all(len(key) == 34 and key[:2] == b"\x1e\x20" for key in keys)
    assert not {key[2:] for key in keys} & set(chain(MODEL, text(5 * SEGMENT_TOKENS + 1)))


def test_a_prompt_is_looked_up_from_its_end_down() -> None:
    keys = chain(MODEL, text(3 * SEGMENT_TOKENS + 7))
    assert lookup_keys(keys, None) == [dht_key(key) for key in (keys.last, keys.keys[3], keys.keys[2], keys.keys[1])]
    exact = chain(MODEL, text(2 * SEGMENT_TOKENS))
    assert lookup_keys(exact, None) == [dht_key(exact.keys[2]), dht_key(exact.keys[1])]


@pytest.mark.parametrize("shared", [9, 3 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS + 9])
def test_the_end_of_the_shared_part_is_looked_up_first(shared: int) -> None:
    tokens = text(5 * SEGMENT_TOKENS + 1)
    keys = lookup_keys(chain(MODEL, tokens), chain(MODEL, tokens[:shared]))
    assert keys[0] == announced(shared)[1]
    assert len(keys) == len(set(keys))


def test_a_shared_part_that_is_the_whole_prompt_or_nothing_adds_nothing() -> None:
    prompt = chain(MODEL, text(2 * SEGMENT_TOKENS + 5))
    assert lookup_keys(prompt, prompt) == lookup_keys(prompt, None) == lookup_keys(prompt, chain(MODEL, []))
    assert query_keys(prompt, prompt) == query_keys(prompt, None) == query_keys(prompt, chain(MODEL, []))


def test_no_tokens_have_no_keys() -> None:
    empty = chain(MODEL, [])
    assert lookup_keys(empty, None) == query_keys(empty, None) == []


@settings(deadline=None)
@given(st.integers(1, 6 * SEGMENT_TOKENS), st.integers(1, 6 * SEGMENT_TOKENS), st.integers(0, 2 * SEGMENT_TOKENS))
def test_texts_that_share_a_segment_meet(published: int, asked: int, ending: int) -> None:
    """Whatever the lengths: the prompt looks up a key of the artifact, at half of what they share or more."""
    prompt = text(asked, ending=min(ending, asked))
    shared = min(published, asked - min(ending, asked)) // SEGMENT_TOKENS
    common = set(announced(published)) & set(lookup_keys(chain(MODEL, prompt), None))
    if shared:
        assert common
        lengths = [n for n in range(1, shared + 1) if dht_key(chain(MODEL, prompt).keys[n]) in common]
        assert max(lengths) * 2 > shared


@settings(deadline=None)
@given(st.integers(1, 4 * SEGMENT_TOKENS), st.integers(0, 300))
def test_a_prompt_that_knows_its_shared_part_meets_the_artifact_of_just_that(published: int, more: int) -> None:
    tokens = text(published + more, ending=more)
    keys = lookup_keys(chain(MODEL, tokens), chain(MODEL, tokens[:published]))
    assert keys[0] in announced(published)


def test_a_provider_is_asked_for_every_segment_and_both_tails() -> None:
    tokens = text(2 * SEGMENT_TOKENS + 5)
    prompt, shared = chain(MODEL, tokens), chain(MODEL, tokens[: SEGMENT_TOKENS + 3])
    assert query_keys(prompt, shared) == [prompt.keys[1], prompt.keys[2], shared.tail, prompt.tail]


@pytest.mark.parametrize("count", [MAX_TOKENS, MAX_TOKENS - 1])
def test_the_longest_prompt_fits_one_query(count: int) -> None:
    whole = count // SEGMENT_TOKENS
    prompt = Chain(tuple(bytes((i % 251, i // 251)) * 16 for i in range(whole + 1)), b"t" * 32 if count % 256 else None, count)
    shared = Chain(prompt.keys[:2], b"s" * 32, SEGMENT_TOKENS + 1)
    assert len(query_keys(prompt, shared)) <= MAX_QUERY_KEYS
