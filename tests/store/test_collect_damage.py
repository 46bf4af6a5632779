"""Collecting beside damage: a node that cannot be read does not cost its blocks while there is room for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from p2pkv.formats.cid import Cid, Codec
from p2pkv.limits import LOW_MARK_SHARE
from p2pkv.store.collect import Collector
from tests.store.test_collect import LONGER, ONE, OTHER, Place, size_of
from tests.support.artifacts import Sample
from tests.support.stores import flip_block

NODE = ONE.artifact.manifest.segments[1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path)) as place:
        yield place


def blocks_of(sample: Sample, codec: Codec) -> set[Cid]:
    return {cid for cid in sample.blocks if cid.codec is codec}


def damage(place: Place, *cids: Cid) -> None:
    for cid in cids:
        flip_block(place.layout.home, cid, 100)


def test_the_blocks_of_a_damaged_node_stay_until_it_is_here_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.add(ONE)
    place.put(OTHER)
    damage(place, NODE)
    collector = place.collector()
    for _ in range(2):  # damaged, and then missing
        told, collected = collector.collect(dry_run=True), collector.collect()
        assert (told.left, told.blocks) == (collected.left, collected.blocks)
        assert place.here(ONE) == set(ONE.blocks) - {NODE}
        assert place.here(OTHER) == blocks_of(OTHER, Codec.RAW)  # any of these could be a block of the node
        assert "may belong to 1 damaged nodes" in caplog.text
    place.blocks.write(NODE, ONE.blocks[NODE])
    assert collector.collect().left == size_of(ONE)
    assert place.here(ONE) == set(ONE.blocks)
    assert not place.here(OTHER)


def test_a_node_that_comes_back_meanwhile_counts_as_here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add(ONE)
    place.put(OTHER)
    damage(place, NODE)
    collector = Collector(place.database, place.blocks, place.reserve)
    decide = Collector._decide

    def mend(*arguments: Any) -> Any:
        place.blocks.write(NODE, ONE.blocks[NODE])
        return decide(collector, *arguments)

    monkeypatch.setattr(collector, "_decide", mend)  # between the marking and the decision
    assert collector.collect().left == size_of(ONE)
    assert not place.here(OTHER)


def test_where_room_is_needed_what_cannot_be_told_goes_first(place: Place) -> None:
    place.add(ONE)
    place.put(OTHER)
    damage(place, NODE)
    collected = place.collector(quota=size_of(ONE, OTHER) - len(ONE.blocks[NODE]) - 1).collect()
    assert collected.evicted == ()
    assert not place.here(OTHER)
    lost = {ref.cid for ref in ONE.artifact.open_segment(1, ONE.blocks[NODE]).blocks()}
    assert place.here(ONE) == set(ONE.blocks) - {NODE} - lost


@pytest.mark.parametrize("gone", ["removed", "evicted"])
def test_with_its_artifact_goes_what_was_kept_for_it(place: Place, gone: str) -> None:
    place.add(ONE)
    place.add(OTHER)
    damage(place, NODE)
    place.collector().collect()
    if gone == "removed":
        place.index.remove_artifact(ONE.cid)
        place.collector().collect()
    else:
        place.collector(quota=int(size_of(OTHER) / LOW_MARK_SHARE) + 9).collect()
    assert not place.here(ONE)
    assert place.here(OTHER) == set(OTHER.blocks)


def test_a_node_that_another_artifact_shares_counts_for_both(place: Place) -> None:
    place.add(ONE)
    place.add(LONGER)
    damage(place, NODE)
    place.collector().collect()
    place.index.remove_artifact(ONE.cid)
    place.collector().collect()
    assert place.here(LONGER) == set(LONGER.blocks) - {NODE}


def test_what_is_not_here_yet_keeps_nothing(place: Place) -> None:
    """Of a segment that is not held the node may be missing for want of a peer."""
    place.index.add_artifact(ONE.artifact, [])
    place.blocks.write(ONE.cid, ONE.blocks[ONE.cid])
    place.put(OTHER)
    place.holds.lease(LONGER.cid, 60)
    assert place.collector().collect().left == len(ONE.blocks[ONE.cid])
    assert not place.here(OTHER)


def test_a_damaged_manifest_keeps_what_only_it_names(place: Place) -> None:
    place.add(ONE)
    tokens = b"the token ids of a long text, which lie in a block of their own"
    place.blocks.write(Cid.of_block(tokens), tokens)
    damage(place, ONE.cid)
    collector: Collector = place.collector()
    collector.collect()
    assert place.blocks.has(Cid.of_block(tokens))
    place.blocks.write(ONE.cid, ONE.blocks[ONE.cid])
    collector.collect()
    assert not place.blocks.has(Cid.of_block(tokens))
