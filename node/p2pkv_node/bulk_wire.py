"""What a node and its receiving process say to each other over a socket pair, and the memory that they share.

Both kinds of message have one size each, so a reader needs no framing. The memory is a row of slots, each with room for one
block; a slot that the process has filled is the node's until the node says that it is free.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final, Self

from p2pkv.errors import ProtocolError
from p2pkv.limits import MAX_BULK_CONNECTIONS, MAX_CODED_BLOCK_BYTES

# Blocks that the node has not worked in yet: when its disk is slower than the peers, they have to wait.
BLOCKS_UNDER_WAY: Final = 8
# Every lane may be in the middle of a block beside them.
SLOT_COUNT: Final = 2 * MAX_BULK_CONNECTIONS + BLOCKS_UNDER_WAY
SLOT_BYTES: Final = MAX_CODED_BLOCK_BYTES
MEMORY_BYTES: Final = SLOT_COUNT * SLOT_BYTES  # of address space: only slots that were ever used take memory

MAGIC: Final = b"p2pkvBL1"  # what both sides of a lane greet with
HEADER_BYTES: Final = 40  # of a block frame: see `bulk_lane`
LENGTH_BYTES: Final = 4  # at the end of the header
FINGERPRINT_BYTES: Final = 32
MAX_GREETING_BYTES: Final = 128
_MAX_HOST_BYTES: Final = 64  # an IPv6 address with a scope

_COMMAND: Final = struct.Struct(f"!BIHH{_MAX_HOST_BYTES}s{FINGERPRINT_BYTES}sB{MAX_GREETING_BYTES}s")
_EVENT: Final = struct.Struct(f"!BIHB{HEADER_BYTES}s")
COMMAND_BYTES: Final = _COMMAND.size
EVENT_BYTES: Final = _EVENT.size


def frame_length(header: bytes | memoryview) -> int:
    """Return how many bytes the block behind a frame's header has."""
    return int.from_bytes(header[-LENGTH_BYTES:], "big")


class Order(enum.IntEnum):
    """What the node tells the process."""

    OPEN = 1  # connect, greet, and receive
    CLOSE = 2  # end a lane; the answer is an ENDED, once
    FREE = 3  # a slot may be filled again


class Kind(enum.IntEnum):
    """What the process tells the node."""

    OPENED = 1
    BEGUN = 2  # a frame's header is here, and not all of its block
    BLOCK = 3  # a slot has the whole block of a frame
    ENDED = 4  # the last of a lane


class Ending(enum.IntEnum):
    """Why a lane ended."""

    GONE = 0  # the peer or the network left, or the node wanted it
    CERTIFICATE = 1
    GREETING = 2
    FRAME = 3


@dataclass(frozen=True, slots=True)
class Command:
    """``host`` is an IP address; the ``greeting`` is sent when the peer has shown the certificate of that ``fingerprint``."""

    order: Order
    lane: int = 0
    slot: int = 0
    port: int = 0
    host: str = ""
    fingerprint: bytes = b""
    greeting: bytes = b""

    def encode(self) -> bytes:
        host = self.host.encode("ascii")
        length = len(self.greeting)
        return _COMMAND.pack(self.order, self.lane, self.slot, self.port, host, self.fingerprint, length, self.greeting)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Read COMMAND_BYTES bytes. Raises ProtocolError."""
        try:
            order, lane, slot, port, host, fingerprint, length, greeting = _COMMAND.unpack(data)
            return cls(Order(order), lane, slot, port, host.rstrip(b"\0").decode("ascii"), fingerprint, greeting[:length])
        except (struct.error, ValueError):
            raise ProtocolError("what a node says to its receiving process is no command") from None


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    lane: int
    slot: int = 0
    ending: Ending = Ending.GONE
    header: bytes = b""

    def encode(self) -> bytes:
        return _EVENT.pack(self.kind, self.lane, self.slot, self.ending, self.header)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Read EVENT_BYTES bytes. Raises ProtocolError: a process that strangers may have turned decides nothing here."""
        try:
            kind, lane, slot, ending, header = _EVENT.unpack(data)
            event = cls(Kind(kind), lane, slot, Ending(ending), header)
        except (struct.error, ValueError):
            raise ProtocolError("what a receiving process says is no event") from None
        if slot >= SLOT_COUNT:
            raise ProtocolError(f"a receiving process names slot {slot} of {SLOT_COUNT}")
        return event
