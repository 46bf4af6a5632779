"""The provider's end of a bulk lane: what it was given to send, and what of that has not gone out yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from p2pkv.formats.cid import Cid
from p2pkv.ports import BulkSender
from p2pkv.upload.scheduler import Grant


class LaneOwner(Protocol):
    """The session that a lane belongs to. All but :meth:`read_block` are called from the event loop."""

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        """Read a block into ``buffer``; return 0 where it is not here. For worker threads."""

    def sent(self, blocks: int, size: int, granted: int, missing: Sequence[Cid]) -> None:
        """Blocks of ``size`` bytes together have gone out, of ``granted`` bytes; those that are missing have not."""

    def lane_opened(self, lane: Lane) -> None: ...

    def lane_closed(self, lane: Lane) -> None: ...


class Lane:
    """One bulk lane of a session (``BulkSource``); ``outstanding`` are the bytes that it was given and has not sent yet."""

    def __init__(self, owner: LaneOwner) -> None:
        self._owner = owner
        self._sender: BulkSender | None = None
        self._given: deque[Grant] = deque()
        self.outstanding = 0

    def attach(self, sender: BulkSender) -> None:
        self._sender = sender
        self._owner.lane_opened(self)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def send(self, grants: Sequence[Grant]) -> None:
        """Send blocks; the consumer asks again for what the lane loses."""
        self._given += grants
        self.outstanding += sum(grant.size for grant in grants)
        if self._sender is not None:
            self._sender.send_blocks([grant.cid for grant in grants])

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        return self._owner.read_block(cid, buffer)

    def blocks_sent(self, sizes: Sequence[int]) -> None:
        if not self._given:
            return  # of a lane that was closed here, and let go of all that it was given
        grants = [self._given.popleft() for _ in sizes]
        missing = [grant.cid for grant, size in zip(grants, sizes, strict=True) if not size]
        granted = sum(grant.size for grant in grants)
        self.outstanding -= granted
        self._owner.sent(len(grants) - len(missing), sum(sizes), granted, missing)

    def lane_closed(self) -> None:
        self._owner.lane_closed(self)
        granted, self.outstanding = self.outstanding, 0
        self._given.clear()
        self._owner.sent(0, 0, granted, ())
