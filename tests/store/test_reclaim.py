"""Giving room back within a pack: whatever step fails or is the last before a kill, those who live are still found."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from p2pkv.errors import MachineError
from p2pkv.formats.cid import Cid
from p2pkv.store import pack as pack_module
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.stored_blocks import StoredBlocks

BLOCKS = {Cid.of_block(data): data for data in (bytes([number]) * (9_000 + number) for number in range(12))}
DEAD = list(BLOCKS)[::2]


class KilledError(BaseException):
    """The process is gone."""


def sweep(folder: Path) -> None:
    blocks = BlockPacks(folder)
    with blocks.noting_uses():
        blocks.sweep(cid.binary for cid in DEAD)
    blocks.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = BlockPacks(tmp_path)
    for cid, data in BLOCKS.items():
        blocks.write(cid, data)
    blocks.close()
    return tmp_path


def check(folder: Path) -> None:
    """The living are whole, for readers and for the next start; the dead are whole or gone."""
    for blocks in (StoredBlocks(folder), BlockPacks(folder)):
        for cid, data in BLOCKS.items():
            if cid not in DEAD or blocks.has(cid):
                assert blocks.read(cid) == data


@pytest.mark.parametrize("failure", [KilledError(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "bad")])
@pytest.mark.parametrize("step", range(14))
def test_whatever_step_is_the_last_the_living_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, failure: BaseException
) -> None:
    steps = iter(range(100))

    def stop_at(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(steps) == step:
                raise failure
            return real(*arguments)

        return call

    with monkeypatch.context() as patched:
        blocks = BlockPacks(folder)
        patched.setattr(os, "ftruncate", stop_at(os.ftruncate))
        for name in ("write_at", "punch_hole"):
            patched.setattr(pack_module, name, stop_at(getattr(pack_module, name)))
        with suppress(KilledError, MachineError), blocks.noting_uses():
            blocks.sweep(cid.binary for cid in DEAD)
    check(folder)
    sweep(folder)
    check(folder)
    assert not any(StoredBlocks(folder).has(cid) for cid in DEAD)


def test_a_pack_gives_back_what_it_can(folder: Path) -> None:
    (path,) = folder.iterdir()
    before = path.stat()
    sweep(folder)
    after = path.stat()
    assert after.st_size <= before.st_size
    assert after.st_blocks <= before.st_blocks * 0.75
    check(folder)


def test_a_pack_in_which_nobody_lives_is_removed(folder: Path) -> None:
    blocks = BlockPacks(folder)
    with blocks.noting_uses():
        swept = blocks.sweep(cid.binary for cid in BLOCKS)
    assert (swept.blocks, swept.bytes) == (len(BLOCKS), sum(map(len, BLOCKS.values())))
    assert list(folder.iterdir()) == []


def test_where_no_holes_can_be_made_packs_go_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "punch_hole", lambda *_: False)
    sweep(folder)
    check(folder)
    assert not any(StoredBlocks(folder).has(cid) for cid in DEAD)
