"""A download engine whose events are carried out, for scenarios with made-up time."""

from __future__ import annotations

import random

from p2pkv.download.engine import Ask, Completed, Download, Dropped, Event, PeerProgress, Snubbed, Want, Withdraw
from p2pkv.formats.cid import Cid, Codec, HashFunction

SIZE = 96 * 1024


def cid_at(number: int) -> Cid:
    return Cid(Codec.RAW, HashFunction.BLAKE3, number.to_bytes(32, "big"))


def number_of(cid: Cid) -> int:
    return int.from_bytes(cid.digest, "big")


def wants(count: int, *, start: int = 0, per_deadline: int = 1, size: int | None = SIZE) -> list[Want]:
    return [Want(cid_at(start + i), size, i // per_deadline) for i in range(count)]


class Session:
    """A download and what its events have led to; ``asked[peer]`` are the blocks that this peer still has to send."""

    def __init__(self, *peers: str, seed: int = 0) -> None:
        self.download = Download(random.Random(seed))
        self.asked: dict[str, list[Cid]] = {}
        self.completed: list[Cid] = []
        self.trace: list[Event] = []
        for peer in peers:
            self.add_peer(peer, 0.0)

    def drain(self) -> list[Event]:
        """Carry out what the engine decided, and return it."""
        events: list[Event] = []
        while (event := self.download.next_event()) is not None:
            events.append(event)
            match event:
                case Ask(peer, cids):
                    assert cids
                    self.asked.setdefault(peer, []).extend(cids)
                case Withdraw(peer, cids):
                    assert cids
                    left = self.asked.get(peer, [])
                    assert set(cids) <= set(left)
                    self.asked[peer] = [cid for cid in left if cid not in cids]
                case Completed(cid, _):
                    self.completed.append(cid)
                case Dropped() | Snubbed():
                    pass
        self.trace += events
        return events

    def want(self, several: list[Want], now: float = 0.0) -> list[Event]:
        self.download.add_wants(several, now)
        return self.drain()

    def add_peer(self, peer: str, now: float) -> list[Event]:
        self.download.add_peer(peer, now)
        return self.drain()

    def remove_peer(self, peer: str, now: float) -> list[Event]:
        self.download.remove_peer(peer, now)
        self.asked.pop(peer, None)
        return self.drain()

    def deliver(self, peer: str, now: float, *, size: int = SIZE, count: int = 1) -> list[Event]:
        """Let ``peer`` send the next ``count`` blocks that it was asked for."""
        events: list[Event] = []
        for _ in range(count):
            events += self.receive(peer, self.asked[peer].pop(0), now, size=size)
        return events

    def receive(self, peer: str, cid: Cid, now: float, *, size: int = SIZE) -> list[Event]:
        self.download.receive_blocks(peer, [(cid, size)], now)
        return self.drain()

    def dont_have(self, peer: str, cids: list[Cid], now: float) -> list[Event]:
        self.asked[peer] = [cid for cid in self.asked.get(peer, []) if cid not in cids]
        self.download.receive_dont_have(peer, cids, now)
        return self.drain()

    def have(self, peer: str, cids: list[Cid], now: float) -> list[Event]:
        self.download.receive_have(peer, cids, now)
        return self.drain()

    def tick(self, now: float) -> list[Event]:
        self.download.handle_timer(now)
        return self.drain()

    def numbers(self, peer: str) -> list[int]:
        return [number_of(cid) for cid in self.asked.get(peer, [])]

    def progress(self, peer: str) -> PeerProgress:
        return next(progress for progress in self.download.progress() if progress.peer == peer)


def warm_up(session: Session, *peers: str, gap: float = 0.01, blocks: int = 8) -> float:
    """Let each peer deliver ``blocks`` blocks of its own, so that its rate is known; return the time of the end."""
    now = 0.0
    for index, peer in enumerate(peers):
        others = [other for other in session.download.progress() if other.peer != peer]
        assert not any(other.outstanding for other in others)
        session.want(wants(blocks, start=1_000_000 + 1000 * index), now)
        for other in others:  # leave all of it to this peer
            session.dont_have(other.peer, [cid_at(1_000_000 + 1000 * index + i) for i in range(blocks)], now)
        while session.asked.get(peer):
            now += gap
            session.deliver(peer, now)
    assert session.download.missing == 0
    session.completed.clear()
    return now
