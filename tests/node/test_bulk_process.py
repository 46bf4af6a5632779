"""The process that receives on lanes: what it and its node say to each other, and that it never outlives its node."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio
from hypothesis import given, strategies as st

from p2pkv.formats.cid import CID_BYTES
from p2pkv_node import bulk_receive
from p2pkv_node.bulk import TlsBulkLane
from p2pkv_node.bulk_wire import (
    COMMAND_BYTES,
    EVENT_BYTES,
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    LENGTH_BYTES,
    MAX_GREETING_BYTES,
    MEMORY_BYTES,
    SLOT_COUNT,
    Command,
    Ending,
    Event,
    Kind,
    Order,
)
from tests.support.lanes import DEADLINE_S, Sink, Source, block, make_lane, open_lane, receiving_processes, until

_U32 = st.integers(0, 2**32 - 1)
_SLOT = st.integers(0, SLOT_COUNT - 1)


@given(
    st.builds(
        Command,
        st.sampled_from(Order),
        _U32,
        _SLOT,
        st.integers(0, 65_535),
        st.ip_addresses().map(str),
        st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES),
        st.binary(max_size=MAX_GREETING_BYTES),
    )
)
def test_a_command_comes_back_as_it_was(command: Command) -> None:
    data = command.encode()
    assert len(data) == COMMAND_BYTES
    assert Command.decode(data) == command


@given(
    st.builds(
        Event,
        st.sampled_from(Kind),
        _U32,
        _SLOT,
        st.sampled_from(Ending),
        st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES),
    )
)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    data = event.encode()
    assert len(data) == EVENT_BYTES
    assert Event.decode(memoryview(data)) == event


@contextmanager
def bare_process() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The process, and the node's end of its socket."""
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("test")
    os.ftruncate(memory, MEMORY_BYTES)
    command = [sys.executable, "-m", "p2pkv_node.bulk_process", str(theirs.fileno()), str(memory)]
    with ours:
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), memory))
        theirs.close()
        os.close(memory)
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def test_it_ends_when_its_node_is_gone() -> None:
    with bare_process() as (process, node):
        node.close()
        assert process.wait(DEADLINE_S) == 0


def test_without_a_descriptor_for_it_a_lane_ends_alone() -> None:
    with bare_process() as (process, node), socket.create_server(("127.0.0.1", 0)) as listener:
        node.settimeout(DEADLINE_S)
        there = Command(Order.OPEN, 1, port=listener.getsockname()[1], host="127.0.0.1")
        node.sendall(there.encode())
        peer, _ = listener.accept()  # the process is up, with all descriptors that it needs
        with peer:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, 3))
            node.sendall(replace(there, lane=2).encode())
            assert Event.decode(node.recv(EVENT_BYTES)).lane == 2
            node.sendall(Command(Order.CLOSE, 1).encode())
            assert Event.decode(node.recv(EVENT_BYTES)).lane == 1


def test_a_frame_begins_with_a_cid() -> None:
    assert HEADER_BYTES == CID_BYTES + LENGTH_BYTES


def test_an_interrupt_is_left_to_the_node() -> None:
    with bare_process() as (process, node):
        command = Command(Order.OPEN, 7, port=1, host="127.0.0.1", fingerprint=bytes(32))
        node.sendall(command.encode())
        node.settimeout(DEADLINE_S)
        # A port that refuses: the process is up, and past its first lines.
        assert Event.decode(node.recv(EVENT_BYTES)) == Event(Kind.ENDED, 7, header=bytes(HEADER_BYTES))
        process.send_signal(signal.SIGINT)
        node.sendall(command.encode())
        assert Event.decode(node.recv(EVENT_BYTES)).kind is Kind.ENDED
        node.close()
        assert process.wait(DEADLINE_S) == 0


def test_commands_may_come_in_pieces_and_for_lanes_that_have_ended() -> None:
    with bare_process() as (_, node):
        commands = [Command(Order.CLOSE, 3), Command(Order.OPEN, 4, port=1, host="::1"), Command(Order.CLOSE, 4)]
        for byte in b"".join(command.encode() for command in commands):
            node.send(bytes((byte,)))
        node.settimeout(DEADLINE_S)
        assert Event.decode(node.recv(EVENT_BYTES)).lane == 4
        node.sendall(Command(Order.OPEN, 5, port=1, host="127.0.0.1").encode())
        assert Event.decode(node.recv(EVENT_BYTES)).lane == 5  # and nothing else of the others


async def test_one_that_hangs_is_killed_at_the_end(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_receive, "_EXIT_TIMEOUT_S", 0.1)
    one, sink = block(1), Sink(block(1))
    async with make_lane().running() as consumer:
        sender, _ = await open_lane(lane, sink, Source(one), consumer=consumer)
        (process,) = receiving_processes()
        os.kill(process, signal.SIGSTOP)
        sender.send_blocks([one[0]])
    assert receiving_processes() == []
    assert sink.closed == 1
    assert sink.received == []


async def test_a_receiver_that_hangs_delays_no_other_node(lane: TlsBulkLane) -> None:
    """The lane is given up in time, and the provider goes on: nothing waits for the process but the node's end."""
    async with make_lane().running() as consumer:
        consumer.prepare()
        (process,) = receiving_processes()
        os.kill(process, signal.SIGSTOP)
        with trio.move_on_after(0.1):
            await open_lane(lane, Sink(), consumer=consumer)
        os.kill(process, signal.SIGCONT)
        await until(lambda: consumer.statistics().receiving_lanes == 0)
        await open_lane(lane, Sink(), consumer=consumer)
