"""An index that was lost is made anew from the packs: what is listed, held and found is as before."""

from __future__ import annotations

import logging
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.artifact import build
from p2pkv.errors import StoreError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import layer_bytes
from p2pkv.store import database, rebuild
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from tests.store.losses import (
    LONGER,
    LOSSES,
    ONE,
    OTHER,
    SAMPLES,
    SHORT,
    TOKENS,
    every_loss,
    fill,
    index_files,
    lose,
    put,
    tell,
    told,
)
from tests.support.artifacts import KEY, NOW, PUBLISHER, Sample, model
from tests.support.stores import flip_block


def held_of(sample: Sample, here: set[Cid]) -> set[int]:
    """Return the segments of which node and blocks are ``here``."""
    manifest = sample.artifact.manifest
    opened = [sample.artifact.open_segment(index, sample.blocks[node]) for index, node in enumerate(manifest.segments)]
    parts = [{node, *(ref.cid for ref in one.blocks())} for node, one in zip(manifest.segments, opened, strict=True)]
    return {index for index, cids in enumerate(parts) if cids <= here}


# --- what is listed -------------------------------------------------------------------------------------------------------


@every_loss
def test_whatever_is_lost_of_the_index_all_is_listed_again(tmp_path: Path, loss: str) -> None:
    before = fill(tmp_path, *SAMPLES)
    lose(tmp_path, loss)
    assert tell(tmp_path) == before
    assert tell(tmp_path) == before


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_listed_held_and_found_is_as_before(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(SAMPLES), unique_by=lambda sample: sample.cid, min_size=1))
    blocks = {cid: block for sample in chosen for cid, block in sample.blocks.items()}
    lacking = data.draw(st.sets(st.sampled_from(sorted(blocks, key=str)), max_size=6)) - {sample.cid for sample in chosen}
    foreign = data.draw(st.lists(st.binary(max_size=300), max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with open_store(home) as store:
            for sample in chosen:
                put(store, sample, without=lacking)
            for junk in foreign:
                store.write(Cid.of_node(junk), junk)
                node = dagcbor.encode({"kind": "p2pkv/envelope", "junk": junk})
                store.write(Cid.of_node(node), node)
            here = blocks.keys() - lacking
            for sample in chosen:
                if here & set(sample.artifact.manifest.segments):
                    store.index.add_artifact(sample.artifact, held_of(sample, here))
            before = told(store)
        lose(home, data.draw(st.sampled_from(list(LOSSES))))
        assert tell(home) == before


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_is_damaged_is_not_held(data: st.DataObject) -> None:
    blocks = {cid: block for sample in SAMPLES for cid, block in sample.blocks.items()}
    damaged = data.draw(st.sets(st.sampled_from(sorted(blocks, key=str)), min_size=1, max_size=4))
    nodes = {cid for sample in SAMPLES for cid in sample.artifact.manifest.segments}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fill(home, *SAMPLES)
        for cid in damaged:
            flip_block(home, cid, data.draw(st.integers(0, 8 * len(blocks[cid]) - 1)))
        lose(home)
        with open_store(home) as store:
            listed = {row.manifest_cid: row.complete for row in store.index.artifacts()}
            lost = damaged & nodes  # a block is hashed when it is read
            for sample in SAMPLES:
                if sample.cid in damaged or not set(sample.artifact.manifest.segments) - lost:
                    assert sample.cid not in listed
                else:
                    held = held_of(sample, blocks.keys() - lost)
                    assert set(store.index.held_keys(sample.cid)) == held
                    assert listed[sample.cid] is (len(held) == len(sample.artifact.chain_keys))


def test_token_ids_in_a_block_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MAX_INLINE_TOKEN_BYTES", 100)
    blocks: dict[Cid, bytes] = {}
    builder = build.ArtifactBuilder(model(), TOKENS[:100], lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    builder.add_segment([bytes(layer_bytes(layer, 100, model().dtype)) for layer in model().layers])
    envelope = Envelope.sign(builder.finish(build.Terms(PUBLISHER, 1, NOW), {}), KEY)
    with open_store(tmp_path) as store:
        for cid, data in (*blocks.items(), (envelope.cid, envelope.encode())):
            store.write(cid, data)
    lose(tmp_path)
    assert tell(tmp_path)["artifacts"] == {envelope.cid: ("tiny", 1, True)}
    tokens = envelope.open().tokens.cid
    assert tokens is not None
    flip_block(tmp_path, tokens, 7)
    lose(tmp_path)
    assert tell(tmp_path)["artifacts"] == {}  # nobody can say which text it is


@pytest.mark.parametrize("order", [1, -1])
def test_a_segment_is_held_only_by_those_that_its_node_fits(tmp_path: Path, order: int) -> None:
    """Whoever signs may name any nodes; whether they are looked at before or after those that they are taken from."""
    manifest, strange = ONE.artifact.manifest, OTHER.artifact.manifest
    others = [
        replace(strange, segments=manifest.segments),  # of another text
        replace(manifest, layers=manifest.layers[:1]),  # of another geometry
        replace(manifest, segments=manifest.segments[::-1]),
    ]
    forged = [Envelope.sign(other, KEY) for other in others]
    with open_store(tmp_path) as store:
        for envelope in [*forged, Envelope.sign(manifest, KEY)][::order]:
            store.write(envelope.cid, envelope.encode())
        put(store, ONE, without=[ONE.cid])
    lose(tmp_path)
    with open_store(tmp_path) as store:
        assert set(store.index.held_keys(ONE.cid)) == {0, 1, 2}
        assert [set(store.index.held_keys(envelope.cid)) for envelope in forged] == [set(), set(), {1}]
        assert store.index.counts() == (4, 1)


def test_an_envelope_of_which_nothing_is_here_is_not_listed(tmp_path: Path) -> None:
    """A fetch stores envelopes before it judges them, and refuses some."""
    with open_store(tmp_path) as store:
        put(store, ONE)
        store.write(OTHER.cid, OTHER.blocks[OTHER.cid])
    lose(tmp_path)
    assert tell(tmp_path)["artifacts"] == {ONE.cid: ("tiny", 3, True)}


def test_an_artifact_that_was_removed_is_listed_again_until_it_is_collected(tmp_path: Path) -> None:
    fill(tmp_path, ONE, OTHER)
    with open_store(tmp_path) as store:
        assert store.remove(OTHER.cid)
    lose(tmp_path)
    with open_store(tmp_path) as store:
        assert store.remove(OTHER.cid)
        store.collector.collect()
    lose(tmp_path)
    assert tell(tmp_path)["artifacts"] == {ONE.cid: ("tiny", 3, True)}


def test_the_order_is_that_of_storing(tmp_path: Path) -> None:
    order = [OTHER, SHORT, ONE]
    fill(tmp_path, *order)
    lose(tmp_path)
    with open_store(tmp_path) as store:
        assert [row.manifest_cid for row in store.index.artifacts()] == [sample.cid for sample in reversed(order)]
        store.collector._quota = 1
        assert [gone.manifest_cid for gone in store.collector.collect().evicted] == [sample.cid for sample in order]


def test_a_store_goes_on_as_one_that_was_never_lost(tmp_path: Path) -> None:
    fill(tmp_path, ONE)
    lose(tmp_path, "garbage")
    with open_store(tmp_path) as store:
        put(store, LONGER)
        store.add_artifact(LONGER.artifact, frozenset(range(4)))
        after = told(store)
        assert store.index.counts() == (2, 2)
    assert tell(tmp_path) == after


# --- when -----------------------------------------------------------------------------------------------------------------


def test_a_new_home_makes_nothing_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path):
        pass
    HomeLayout(tmp_path).index.unlink()
    with open_store(tmp_path):
        pass
    assert not caplog.records
    assert index_files(tmp_path) == ["index.sqlite"]


def test_a_damaged_index_without_packs_is_moved_aside(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    lose(tmp_path, "garbage")
    with open_store(tmp_path) as store:
        assert store.index.counts() == (0, 0)
    assert index_files(tmp_path) == ["index.sqlite", "index.sqlite.damaged-1"]


def test_an_index_that_is_well_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, ONE)
    with open_store(tmp_path) as store:
        store.index.remove_artifact(ONE.cid)
    with open_store(tmp_path) as store:
        assert store.index.counts() == (0, 0)
    assert not caplog.records


def test_the_index_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    before = fill(tmp_path, ONE, SHORT)
    with open_store(tmp_path) as store:
        store.index.touch(ONE.cid)
        used = store.index.artifacts()
    with closing(sqlite3.connect(HomeLayout(tmp_path).index)) as connection:
        connection.executescript("DROP TABLE pins; DROP TABLE leases; DROP TABLE downloads; PRAGMA user_version = 1;")
    with open_store(tmp_path) as store:
        assert told(store) == before
        assert store.index.artifacts() == used
    assert index_files(tmp_path) == ["index.sqlite"]


def test_the_index_of_a_newer_version_is_never_touched(tmp_path: Path) -> None:
    fill(tmp_path, ONE)
    path = HomeLayout(tmp_path).index
    lose(tmp_path, "page of a table")
    with path.open("r+b") as file:
        file.seek(60)  # user_version, in the header of every SQLite file
        file.write((99).to_bytes(4, "big"))
    before = path.read_bytes()
    with pytest.raises(UnknownVersionError, match="version 99"), open_store(tmp_path):
        pass
    assert path.read_bytes() == before
    assert index_files(tmp_path) == ["index.sqlite"]


def test_a_large_index_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, ONE)
    lose(tmp_path, "page of an index")
    monkeypatch.setattr(database, "MAX_CHECKED_INDEX_BYTES", 0)
    with open_store(tmp_path) as store, pytest.raises(StoreError) as caught:
        store.index.add_artifact(SHORT.artifact, [])
    assert "Restart the node" in caught.value.advice
    monkeypatch.undo()
    with open_store(tmp_path) as store:
        assert store.index.counts() == (1, 1)


def test_the_log_tells_what_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *SAMPLES)
    monkeypatch.setattr(rebuild, "_PROGRESS_NODES", 5)
    lose(tmp_path, "garbage")
    flip_block(tmp_path, OTHER.cid, 9)
    with caplog.at_level(logging.INFO), open_store(tmp_path):
        pass
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[0][0] == lines[-1][0] == "WARNING"
    assert "index.sqlite is damaged: file is not a database" in lines[0][1]
    assert ("INFO", "looked at 5 of 15 nodes") in [(level, text.partition(":")[0]) for level, text in lines]
    assert any("1 nodes cannot be read" in text for _, text in lines)
    assert "4 artifacts, 4 of them complete, and 0 pins" in lines[-1][1]
    assert str(tmp_path / "index.sqlite.damaged-1") in lines[-1][1]
