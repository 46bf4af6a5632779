"""Leases of the client: renewed by themselves, mapped and verified, and ended in good order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pkv import AsyncClient, Client
from p2pkv.client.calls import Call
from p2pkv.client.lease import Lease
from p2pkv.errors import (
    DaemonUnreachableError,
    FetchIncompleteError,
    IntegrityError,
    NotFoundError,
    P2pkvError,
    StoreError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_LEASE_S
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.home import HomeLayout
from p2pkv_node import embedded_node
from tests.cli.artifacts import store as hold
from tests.support.artifacts import make_sample
from tests.support.cars import data_blocks
from tests.support.stores import flip_block

SAMPLE = make_sample(list(range(600)))
DEADLINE_S = 20.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    hold(tmp_path / "home", SAMPLE)
    with embedded_node(tmp_path / "home") as node:
        yield node.home


def test_what_is_leased_is_mapped_and_stays_through_a_collection(home: Path) -> None:
    with Client(home) as client:
        with client.lease(SAMPLE.cid, seconds=30) as lease:
            assert lease.blocks.keys() == SAMPLE.blocks.keys()
            before = {cid: lease.map(cid) for cid in SAMPLE.blocks}
            client.remove(SAMPLE.cid)
            assert client.collect()["blocks"] == 0
            assert client.stats()["room"]["leases"] == 1
            assert {cid: bytes(view) for cid, view in before.items()} == SAMPLE.blocks
            assert {cid: bytes(lease.map(cid)) for cid in SAMPLE.blocks} == SAMPLE.blocks
            assert all(view.readonly for view in before.values())
        assert client.stats()["room"]["leases"] == 0
        assert client.collect()["blocks"] == len(SAMPLE.blocks)


def test_what_cannot_be_leased(home: Path) -> None:
    with Client(home) as client:
        with pytest.raises(NotFoundError), client.lease(Cid.of_node(b"nobody")):
            pytest.fail("it is not here")
        for seconds in (0, -1, MAX_LEASE_S + 1):
            with pytest.raises(UsageError), client.lease(SAMPLE.cid, seconds=seconds):
                pytest.fail("no such time")
        with client.lease(SAMPLE.cid) as lease, pytest.raises(NotFoundError):
            lease.map(Cid.of_block(b"of another"))


def test_a_block_that_rotted_is_not_handed_out(home: Path) -> None:
    victim = data_blocks(SAMPLE)[2]
    with Client(home) as client, client.lease(SAMPLE.cid) as lease:
        flip_block(home, victim, 9)
        with pytest.raises(IntegrityError):
            lease.map(victim)
        assert bytes(lease.map(data_blocks(SAMPLE)[3])) == SAMPLE.blocks[data_blocks(SAMPLE)[3]]


def test_what_is_not_whole_is_not_lent(tmp_path: Path) -> None:
    hold(tmp_path, SAMPLE, without=data_blocks(SAMPLE)[:1])
    with embedded_node(tmp_path), Client(tmp_path) as client, pytest.raises(FetchIncompleteError), client.lease(SAMPLE.cid):
        pytest.fail("a block is missing")


def test_an_error_of_the_block_is_raised_as_it_is_and_ends_the_lease(home: Path) -> None:
    with Client(home) as client:
        with pytest.raises(ZeroDivisionError), client.lease(SAMPLE.cid):
            _ = 1 / 0
        assert client.stats()["room"]["leases"] == 0


def test_an_async_program_that_is_cancelled_gives_its_lease_back(home: Path) -> None:
    async def work() -> None:
        async with AsyncClient(home) as client:
            with trio.CancelScope() as scope:
                async with client.lease(SAMPLE.cid) as lease:
                    assert bytes(lease.map(SAMPLE.cid)) == SAMPLE.blocks[SAMPLE.cid]
                    scope.cancel()
                    await trio.sleep(DEADLINE_S)
            assert scope.cancelled_caught
            assert (await client.stats())["room"]["leases"] == 0

    trio.run(work)


# --- renewing ----------------------------------------------------------------------------------------------------------


class Script:
    """Answers each call with the next of ``answers``, the last one for ever; raises those that are errors."""

    def __init__(self, folder: Path, *answers: str | P2pkvError) -> None:
        with_blocks = BlockPacks(folder)
        for cid, data in SAMPLE.blocks.items():
            with_blocks.write(cid, data)
        self._blocks = {str(cid): with_blocks.locate(cid) for cid in SAMPLE.blocks}
        with_blocks.close()
        self.folder = folder
        self._answers = list(answers)
        self.calls: list[tuple[str, str]] = []
        self.thirty = threading.Event()

    def __call__(self, call: Call) -> dict[str, Any]:
        self.calls.append((call.method, call.path))
        if len(self.calls) >= 30:
            self.thirty.set()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, P2pkvError):
            raise answer
        return {"lease": answer, "expires": 0.0, "blocks": self._blocks}

    def lease(self) -> Lease:
        return Lease(self, self.folder, SAMPLE.cid, 0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layout = HomeLayout(tmp_path)
    layout.create()
    return layout.blocks


def test_a_lease_is_renewed_again_and_again_and_then_given_back(folder: Path) -> None:
    script = Script(folder, "name")
    lease = script.lease()
    assert script.thirty.wait(DEADLINE_S)
    lease.give_back()
    assert script.calls[0] == ("POST", "/v1/leases")
    assert set(script.calls[1:-1]) == {("POST", "/v1/leases/name")}
    assert script.calls[-1] == ("DELETE", "/v1/leases/name")
    lease.check()
    assert threading.active_count() == len(threading.enumerate())
    assert not [thread for thread in threading.enumerate() if thread.name == "p2pkv-lease"]


def test_a_daemon_that_is_away_for_a_while_costs_no_lease(folder: Path) -> None:
    script = Script(folder, "name", *[DaemonUnreachableError("away")] * 5, "name")
    lease = script.lease()
    assert script.thirty.wait(DEADLINE_S)
    lease.give_back()
    lease.check()


def test_a_daemon_that_was_started_anew_gives_another_lease(folder: Path) -> None:
    script = Script(folder, "name", "name", NotFoundError("no such lease"), "another")
    lease = script.lease()
    assert script.thirty.wait(DEADLINE_S)
    lease.give_back()
    assert script.calls[2:4] == [("POST", "/v1/leases/name"), ("POST", "/v1/leases")]
    assert script.calls[-1] == ("DELETE", "/v1/leases/another")
    lease.check()


def test_a_daemon_that_ended_takes_the_lease_with_it(folder: Path) -> None:
    script = Script(folder, "name", DaemonUnreachableError("it ended"))
    lease = script.lease()
    assert script.thirty.wait(DEADLINE_S)
    lease.give_back()
    assert script.calls[-1] == ("DELETE", "/v1/leases/name")


def test_a_lease_that_is_lost_says_so_at_the_end(folder: Path) -> None:
    script = Script(folder, "name", NotFoundError("gone"))
    lease = script.lease()
    lease._thread.join(DEADLINE_S)
    with pytest.raises(NotFoundError, match="gone"):
        lease.check()
    lease.give_back()


def test_a_pack_that_is_cut_off_or_gone(folder: Path) -> None:
    script = Script(folder, "name")
    lease = script.lease()
    try:
        (pack,) = {location.file for location in lease.blocks.values()}
        os.truncate(folder / pack, 200)
        with pytest.raises(NotFoundError, match="cut off"):
            lease.map(data_blocks(SAMPLE)[-1])
        os.unlink(folder / pack)
        with pytest.raises(NotFoundError, match="gone"):
            lease.map(SAMPLE.cid)
        (folder / pack).symlink_to(pack)
        with pytest.raises(StoreError):
            lease.map(SAMPLE.cid)
    finally:
        lease.give_back()
