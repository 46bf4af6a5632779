"""What artifacts take: what is held of them, with what they share counted for each, and little read at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_INLINE_TOKEN_BYTES
from p2pkv.store.sizes import ArtifactSize, ArtifactSizes
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample, make_sample

ONE = make_sample(list(range(600)))
LONGER = make_sample([*range(600), *range(300)])  # shares two whole segments
OTHER = make_sample(list(range(5000, 5300)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


def add(store: Store, sample: Sample, held: int | None = None) -> None:
    segments = range(len(sample.artifact.manifest.segments) if held is None else held)
    for cid, data in sample.blocks.items():
        store.write(cid, data)
    store.index.add_artifact(sample.artifact, segments)


def of_segments(sample: Sample, *indices: int) -> int:
    """Return the bytes of nodes and blocks."""
    total = 0
    for index in indices:
        node = sample.artifact.manifest.segments[index]
        segment = sample.artifact.open_segment(index, sample.blocks[node])
        total += len(sample.blocks[node]) + sum(ref.size for ref in segment.blocks())
    return total


def whole(sample: Sample) -> int:
    return sum(map(len, sample.blocks.values()))


def sizes_of(store: Store, reads: int = 100) -> ArtifactSizes:
    return ArtifactSizes(store.database, store.blocks, reads=reads)


def test_what_is_held_and_what_is_shared(store: Store) -> None:
    add(store, ONE)
    add(store, OTHER, held=1)
    sizes = sizes_of(store)
    envelope = len(OTHER.blocks[OTHER.cid])
    assert sizes.newest(9) == {
        ONE.cid: ArtifactSize(whole(ONE), 0),
        OTHER.cid: ArtifactSize(envelope + of_segments(OTHER, 0), 0),
    }
    add(store, LONGER)
    found = sizes.newest(9)
    assert found[ONE.cid] == ArtifactSize(whole(ONE), of_segments(ONE, 0, 1))
    assert found[LONGER.cid] == ArtifactSize(whole(LONGER), of_segments(ONE, 0, 1))
    store.index.remove_artifact(ONE.cid)
    assert sizes.newest(9)[LONGER.cid] == ArtifactSize(whole(LONGER), 0)
    store.index.mark_held(OTHER.cid, [1])
    assert sizes.newest(9)[OTHER.cid] == ArtifactSize(whole(OTHER), 0)


def test_token_ids_in_a_block_of_their_own_count_too(store: Store) -> None:
    long = make_sample([7] * (MAX_INLINE_TOKEN_BYTES // 4 + 1))
    add(store, long, held=0)
    token_block = long.artifact.manifest.tokens.cid
    assert token_block is not None
    expected = len(long.blocks[long.cid]) + len(long.blocks[token_block])
    assert sizes_of(store).newest(1) == {long.cid: ArtifactSize(expected, 0)}


def test_only_the_newest_are_looked_at(store: Store) -> None:
    add(store, ONE)
    add(store, OTHER)
    assert sizes_of(store).newest(1).keys() == {OTHER.cid}


def test_little_is_read_at_once_and_nothing_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, ONE)  # a manifest and three nodes
    add(store, OTHER)  # a manifest and two
    read: list[Cid] = []
    peek = store.blocks.peek

    def noting(cid: Cid) -> bytes:
        read.append(cid)
        return peek(cid)

    monkeypatch.setattr(store.blocks, "peek", noting)
    sizes = sizes_of(store, reads=3)
    known = []
    for _ in range(4):
        before = len(read)
        known.append(sizes.newest(9).keys())
        assert len(read) - before <= 3
    assert known == [{OTHER.cid}, {OTHER.cid}, {ONE.cid, OTHER.cid}, {ONE.cid, OTHER.cid}]
    assert len(read) == len(set(read)) == 7


def test_a_store_that_has_not_changed_is_not_looked_at_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, ONE)
    sizes = sizes_of(store)
    found = sizes.newest(9)
    monkeypatch.setattr(sizes, "_look", lambda newest: pytest.fail("nothing has changed"))
    assert sizes.newest(9) == found


def test_what_is_gone_or_damaged_counts_for_nothing_until_it_is_back(store: Store) -> None:
    add(store, ONE)
    node = ONE.artifact.manifest.segments[2]
    location = store.locate(node)
    assert location is not None
    store.blocks._forget(node, location)
    sizes = sizes_of(store)
    assert sizes.newest(9) == {ONE.cid: ArtifactSize(whole(ONE) - of_segments(ONE, 2), 0)}
    store.write(node, ONE.blocks[node])
    assert sizes.newest(9) == {ONE.cid: ArtifactSize(whole(ONE), 0)}
