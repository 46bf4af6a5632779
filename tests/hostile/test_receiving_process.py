"""Attacks out of the process that receives on bulk lanes, as if a stranger's bytes had turned it: the node stays."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from p2pkv.errors import PeerUnreachableError
from p2pkv_node.bulk import TlsBulkLane
from p2pkv_node.bulk_wire import SLOT_COUNT, Event, Kind
from tests.support.lanes import Sink, block, make_lane, open_lane, until

SAID: dict[str, bytes] = {
    "events of a kind that is none": b"\xff" * 480,
    "an event of a lane that is none": Event(Kind.OPENED, 77, header=bytes(40)).encode(),
    "a block in a slot that is none": Event(Kind.BLOCK, 1, SLOT_COUNT, header=bytes(40)).encode(),
    "the end of a lane twice": Event(Kind.ENDED, 1, header=bytes(40)).encode() * 2,
}
# What runs in its place: it waits until a lane is to be opened, says what it was given, and hears on.
_TURNED = """
import socket, sys
node = socket.socket(fileno=int(sys.argv[1]))
node.recv(1)
node.sendall(bytes.fromhex({!r}))
while node.recv(1 << 20):
    pass
"""
Popen = Callable[..., "subprocess.Popen[bytes]"]


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_what_it_says_ends_it_alone(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    start: Popen = subprocess.Popen

    def start_turned(program: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([program[0], "-c", _TURNED.format(said.hex()), *program[3:]], **options)

    async with make_lane().running() as consumer:
        with monkeypatch.context() as patched:
            patched.setattr("p2pkv_node.bulk_receive.subprocess.Popen", start_turned)
            with pytest.raises(PeerUnreachableError):
                await open_lane(lane, Sink(), consumer=consumer)
        await until(lambda: consumer.statistics().receiving_lanes == 0)
        sink = Sink(block(1))
        await open_lane(lane, sink, consumer=consumer)  # with another process
