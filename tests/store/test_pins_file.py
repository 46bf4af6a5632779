"""The copy of the pins: it follows the index, and is what a lost index has its pins from."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from p2pkv.errors import StoreError, UnknownVersionError
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from tests.store.losses import ONE, OTHER, SHORT, every_loss, fill, lose, put, tell, told
from tests.support.stores import flip_block


def pin_both(home: Path) -> dict[str, object]:
    fill(home, ONE, OTHER, SHORT)
    with open_store(home) as store:
        store.holds.pin("release", ONE.cid)
        store.holds.pin("release", OTHER.cid)
        store.holds.pin("mine — \N{SNOWMAN}", OTHER.cid)
        store.holds.unpin("release", ONE.cid)
        store.holds.pin("last", ONE.cid)
        return told(store)


@every_loss
def test_pins_are_as_before_and_hold(tmp_path: Path, loss: str) -> None:
    before = pin_both(tmp_path)
    lose(tmp_path, loss)
    with open_store(tmp_path, quota=1) as store:
        assert told(store) == before
        assert [gone.manifest_cid for gone in store.collector.collect().evicted] == [SHORT.cid]
        assert all(map(store.has, {**ONE.blocks, **OTHER.blocks}))


def test_what_was_unpinned_last_is_not_pinned_again(tmp_path: Path) -> None:
    pin_both(tmp_path)
    with open_store(tmp_path) as store:
        assert store.holds.unpin("last") == 1
        assert store.holds.unpin("release", OTHER.cid) == 1
    lose(tmp_path)
    with open_store(tmp_path) as store:
        assert [(pin.name, pin.manifest_cid) for pin in store.holds.pins()] == [("mine — \N{SNOWMAN}", OTHER.cid)]


def test_a_pin_of_what_cannot_be_listed_holds_for_when_it_comes(tmp_path: Path) -> None:
    pin_both(tmp_path)
    flip_block(tmp_path, ONE.cid, 0)
    lose(tmp_path)
    with open_store(tmp_path, quota=1) as store:
        assert ("last", ONE.cid) in [(pin.name, pin.manifest_cid) for pin in store.holds.pins()]
        put(store, ONE)
        store.index.add_artifact(ONE.artifact, range(3))
        assert ONE.cid not in [gone.manifest_cid for gone in store.collector.collect().evicted]


def test_pins_outlast_a_start_without_index_and_blocks(tmp_path: Path) -> None:
    """As where the disk of the blocks is not there yet."""
    before = pin_both(tmp_path)
    layout = HomeLayout(tmp_path)
    lose(tmp_path)
    layout.blocks.rename(tmp_path / "elsewhere")
    with open_store(tmp_path) as store:
        assert store.holds.pins() == before["pins"]
    layout.blocks.rmdir()
    (tmp_path / "elsewhere").rename(layout.blocks)
    lose(tmp_path)
    assert tell(tmp_path) == before


def test_a_copy_that_is_missing_or_old_is_made_at_the_next_start(tmp_path: Path) -> None:
    before = pin_both(tmp_path)
    layout = HomeLayout(tmp_path)
    for left in (None, b'{"version": 1, "pins": []}', b"nonsense"):
        layout.pins.unlink()
        if left is not None:
            layout.pins.write_bytes(left)
        with open_store(tmp_path):
            pass
        lose(tmp_path)
        assert tell(tmp_path) == before


def test_without_pins_there_is_no_copy_and_an_unchanged_one_is_not_written(tmp_path: Path) -> None:
    fill(tmp_path, ONE)
    layout = HomeLayout(tmp_path)
    assert not layout.pins.exists()
    with open_store(tmp_path) as store:
        store.holds.pin("mine", ONE.cid)
    stamp = layout.pins.stat()
    with open_store(tmp_path):
        pass
    assert layout.pins.stat().st_ino == stamp.st_ino
    assert json.loads(layout.pins.read_bytes())["pins"][0]["manifest"] == str(ONE.cid)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[" * 100_000,
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "pins": [{"name": "a"}]}',
        b'{"version": 1, "pins": [{"name": "a", "manifest": "x", "created": 1}]}',
        b'{"version": 1, "pins": [], "more": 1}',
    ],
)
def test_where_the_copy_is_damaged_too_nothing_is_decided(tmp_path: Path, content: bytes) -> None:
    """Without the pins, collecting would take what somebody wanted kept."""
    before = pin_both(tmp_path)
    lose(tmp_path, "garbage")
    damaged = HomeLayout(tmp_path).index.read_bytes()
    layout = HomeLayout(tmp_path)
    good = layout.pins.read_bytes()
    layout.pins.write_bytes(content)
    with pytest.raises(StoreError) as caught, open_store(tmp_path):
        pass
    assert "move it away" in caught.value.advice
    assert layout.index.read_bytes() == damaged
    assert layout.pins.read_bytes() == content
    layout.pins.write_bytes(good)
    assert tell(tmp_path) == before


def test_the_pins_of_a_newer_version_are_not_guessed(tmp_path: Path) -> None:
    pin_both(tmp_path)
    lose(tmp_path)
    HomeLayout(tmp_path).pins.write_bytes(b'{"version": 2, "pins": {}}')
    with pytest.raises(UnknownVersionError), open_store(tmp_path):
        pass


def test_a_full_disk_does_not_keep_anybody_from_pinning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, ONE)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr("p2pkv.store.pins_file.replace_file", full)
            assert store.holds.pin("mine", ONE.cid)
        assert "copy of the pins is out of date" in caplog.text
        assert store.holds.pin("other", ONE.cid)
    lose(tmp_path)
    with open_store(tmp_path) as store:
        assert [pin.name for pin in store.holds.pins()] == ["mine", "other"]
