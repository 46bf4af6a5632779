"""What a fetch waits for, in the words that people see."""

from __future__ import annotations

import random

import pytest
from trio.testing import MockClock

from p2pkv.download.engine import Ask, Download, Want
from p2pkv.formats.cid import Cid
from p2pkv.swarm.report import FetchEvent, FetchState, Progress
from p2pkv.swarm.teller import Teller

BLOCKS = [Cid.of_block(bytes([number])) for number in range(3)]


class Told:
    """A teller of a download that wants three blocks."""

    def __init__(self) -> None:
        self.events: list[FetchEvent] = []
        self.download = Download(random.Random(0))
        self.download.add_wants([Want(cid, 65_536, 0) for cid in BLOCKS], 0.0)
        self.teller = Teller(self.events.append, self.download)

    def last(self, peers: int) -> tuple[FetchState, str]:
        self.teller.show_transfer(peers)
        event = self.events[-1]
        assert isinstance(event, Progress)
        return event.state, event.detail


@pytest.fixture
async def told(autojump_clock: MockClock) -> Told:
    return Told()


async def test_nobody_has_what_is_missing(told: Told) -> None:
    assert told.last(0) == (FetchState.LOOKING_UP, "nobody reachable has the 3 blocks that are missing yet")


async def test_the_only_peer_that_was_asked_is_named(told: Told) -> None:
    told.download.add_peer("somebody", 0.0)
    event = told.download.next_event()
    assert isinstance(event, Ask)
    assert told.last(2) == (FetchState.TRANSFERRING, "waiting for 3 blocks of peer somebody")


async def test_several_peers_are_counted(told: Told) -> None:
    assert told.last(2) == (FetchState.TRANSFERRING, "waiting for 3 blocks of 2 peers")


async def test_nothing_is_waited_for_where_nothing_is_missing(told: Told) -> None:
    told.download.discard_wants()
    for peers in (0, 2):
        assert told.last(peers) == (FetchState.TRANSFERRING, "")
