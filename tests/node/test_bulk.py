"""The bulk lane over loopback: blocks go over, and nothing stays behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import ssl
import sys
from pathlib import Path
from unittest import mock

import pytest
import trio
import trio.testing

from p2pkv.errors import ListenError, PeerUnreachableError, UsageError
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_STREAMS_PER_PEER
from p2pkv.ports import BulkOffer, BulkSender
from p2pkv.units import KIB, MIB
from p2pkv_node import bulk_send
from p2pkv_node.bulk import BulkSettings, TlsBulkLane, listen
from p2pkv_node.bulk_greeting import TOKEN_BYTES
from p2pkv_node.bulk_receive import process_count
from p2pkv_node.bulk_tls import make_identity
from p2pkv_node.bulk_wire import MAGIC
from tests.support.lanes import (
    HOST,
    PEER,
    Sink,
    Source,
    block,
    greeting,
    lane_threads,
    make_lane,
    offered,
    open_descriptors,
    open_lane,
    receiving_processes,
    stranger,
    until,
)

# --- blocks ------------------------------------------------------------------------------------------------------------------


async def test_a_block_goes_over(lane: TlsBulkLane) -> None:
    cid, data = block(1, MAX_CODED_BLOCK_BYTES)
    sink, source = Sink((cid, data)), Source((cid, data))
    sender, receiver = await open_lane(lane, sink, source)
    statistics = lane.statistics()
    assert (statistics.sending_lanes, statistics.receiving_lanes) == (1, 1)
    sender.send_blocks([cid])
    await until(lambda: len(sink.received) == 1)
    assert sink.received == [(cid, data)]
    await until(lambda: source.sent == [len(data)])
    receiver.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and sink.closed == 1)
    assert source.closed == 1
    statistics = lane.statistics()
    assert (statistics.receiving_lanes, statistics.protocol_faults, statistics.dropped_strangers) == (0, 0, 0)
    assert (statistics.blocks_sent, statistics.bytes_sent) == (1, len(data))
    assert (statistics.blocks_received, statistics.bytes_received) == (1, len(data))


async def test_blocks_of_many_sizes_go_over_in_order_and_are_all_reported(lane: TlsBulkLane) -> None:
    blocks = [block(seed, size) for seed, size in enumerate([1, 16 * KIB - 40, 16 * KIB, 192 * KIB, MIB, 3, 700 * KIB])]
    sink, source = Sink(*blocks), Source(*blocks)
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([cid for cid, _ in blocks[:5]])
    sender.send_blocks([cid for cid, _ in blocks[5:]])
    await until(lambda: len(source.sent) == len(blocks))
    assert source.sent == [len(data) for _, data in blocks]
    await until(lambda: len(sink.received) == len(blocks))
    assert sink.received == blocks


async def test_a_block_that_is_not_here_is_reported_and_the_next_one_sent(lane: TlsBulkLane) -> None:
    here, gone = block(1), block(2)
    sink, source = Sink(here, gone), Source(here)
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([gone[0], here[0], gone[0]])
    await until(lambda: source.sent == [0, len(here[1]), 0])
    await until(lambda: sink.received == [here])


async def test_a_consumer_that_reads_nothing_has_next_to_nothing_read_for_it_and_is_cut_off() -> None:
    blocks = [block(seed, MIB) for seed in range(4)]
    slow, slow_source, sink, source = Sink(*blocks), Source(*blocks), Sink(*blocks), Source(*blocks)
    slow.gate.clear()
    async with (
        make_lane(BulkSettings(host=HOST, send_timeout_s=1.0)).running() as lane,
        make_lane().running() as slow_node,
    ):
        stuck, _ = await open_lane(lane, slow, slow_source, consumer=slow_node)
        sender, _ = await open_lane(lane, sink, source)
        stuck.send_blocks([blocks[number % 4][0] for number in range(200)])
        await until(lambda: len(slow_source.sent) > 0)  # told while there is more to send
        assert slow_source.closed == 0
        for number in range(40):  # its neighbour does not notice
            sender.send_blocks([blocks[number % 4][0]])
        await until(lambda: len(sink.received) == 40)
        # One block is being sent, and the kernel holds what it holds.
        assert slow_source.reads < 40
        await until(lambda: slow_source.closed == 1)
        assert len(slow_source.sent) == slow_source.reads - 1
        slow.gate.set()
        await until(lambda: slow.closed == 1)


async def test_a_lane_ends_before_its_key_is_worn_out(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_send, "MAX_BULK_LANE_BYTES", 128 * KIB)
    blocks = [block(seed) for seed in range(2)]
    sink, source = Sink(*blocks), Source(*blocks)
    sender, _ = await open_lane(lane, sink, source)
    for cid, _ in blocks:
        sender.send_blocks([cid])
    await until(lambda: sink.closed == 1 and source.closed == 1)
    assert len(sink.received) == 2
    assert source.sent == [64 * KIB, 64 * KIB]
    sender.send_blocks([blocks[0][0]])  # dropped
    assert source.reads == 2


# --- closing -----------------------------------------------------------------------------------------------------------------


async def test_the_provider_closes_while_its_thread_is_stuck_in_send(lane: TlsBulkLane) -> None:
    blocks = [block(seed, MIB) for seed in range(4)]
    sink, source = Sink(*blocks), Source(*blocks)
    sink.gate.clear()
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([blocks[0][0]] * 200)
    await until(lambda: source.reads > 0)
    sender.close()
    sender.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and source.closed == 1)
    assert source.reads < 200
    sink.gate.set()
    await until(lambda: sink.closed == 1)


async def test_the_consumer_closes_while_nothing_comes(lane: TlsBulkLane) -> None:
    sink, source = Sink(), Source()
    sender, receiver = await open_lane(lane, sink, source)
    receiver.close()
    receiver.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and sink.closed == 1)
    assert len(lane_threads()) == 1  # the one that waits for the next lane
    assert source.closed == 1
    sender.send_blocks([block(1)[0]])
    assert source.reads == 0


async def test_the_sink_may_close_from_its_own_thread(lane: TlsBulkLane) -> None:
    blocks = [block(seed, KIB) for seed in range(3)]  # they fit the kernel's buffers
    sink = Sink(*blocks)
    sender, receiver = await open_lane(lane, sink, Source(*blocks))
    sink.after_block = receiver.close
    sink.gate.clear()
    sender.send_blocks([cid for cid, _ in blocks])
    await until(lambda: lane.statistics().blocks_sent == 3)
    sink.gate.set()
    await until(lambda: sink.closed == 1)
    assert len(sink.received) == 1  # what the kernel had taken in already does not come after close()


async def test_nothing_stays_behind() -> None:
    before = open_descriptors()
    blocks = [block(seed, MIB) for seed in range(4)]
    sinks = [Sink(*blocks) for _ in range(4)]
    async with make_lane(BulkSettings(host=HOST)).running() as provider, make_lane().running() as consumer:
        senders: list[BulkSender] = []
        for sink in sinks:
            offer = provider.offer(PEER, Source(*blocks), want_sender=senders.append)
            assert offer is not None
            await consumer.connect(HOST, offer, sink)
        await until(lambda: len(senders) == 4)
        for sender in senders:
            sender.send_blocks([blocks[0][0]])
        waiting = await stranger(provider)  # a stranger in the middle of its handshake goes as well
        await until(lambda: all(sink.received for sink in sinks))
        assert len(lane_threads()) == 4 + min(4, process_count())
    waiting.close()
    assert [sink.closed for sink in sinks] == [1, 1, 1, 1]
    assert lane_threads() == []
    assert open_descriptors() == before
    assert provider.port is None
    assert provider.offer(PEER, Source(), want_sender=senders.append) is None
    with pytest.raises(PeerUnreachableError):
        await consumer.connect(HOST, BulkOffer(1, bytes(TOKEN_BYTES), bytes(32)), Sink())


async def test_a_defect_in_a_sink_ends_every_lane_and_is_told(lane: TlsBulkLane) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def receive() -> None:
        async with make_lane().running() as consumer:
            await open_lane(lane, good, consumer=consumer)
            sender, _ = await open_lane(lane, bad, Source(one), consumer=consumer)
            sender.send_blocks([one[0]])
            await trio.sleep_forever()

    bad, good, one = Sink(block(1)), Sink(), block(1)
    bad.after_block = fail
    with pytest.raises(ExceptionGroup) as caught:
        await receive()
    assert caught.group_contains(ZeroDivisionError)
    assert (bad.closed, good.closed) == (1, 1)


async def test_many_lanes_share_a_few_threads(lane: TlsBulkLane) -> None:
    blocks = [block(seed) for seed in range(40)]
    sinks = [Sink(*blocks) for _ in range(MAX_STREAMS_PER_PEER)]
    async with make_lane().running() as consumer:
        senders = [(await open_lane(lane, sink, Source(*blocks), consumer=consumer))[0] for sink in sinks]
        for sender in senders:
            sender.send_blocks([cid for cid, _ in blocks])
        await until(lambda: all(len(sink.received) == 40 for sink in sinks))
        assert len(lane_threads()) == len(sinks) + process_count()
    assert all(sink.received == blocks for sink in sinks)


async def test_a_process_that_dies_takes_its_lanes_along_and_the_next_lane_starts_another(lane: TlsBulkLane) -> None:
    one = block(1)
    first, second = Sink(one), Sink(one)
    async with make_lane().running() as consumer:
        await open_lane(lane, first, consumer=consumer)
        (process,) = receiving_processes()
        os.kill(process, signal.SIGKILL)
        await until(lambda: first.closed == 1)
        sender, _ = await open_lane(lane, second, Source(one), consumer=consumer)
        sender.send_blocks([one[0]])
        await until(lambda: second.received == [one])
        assert receiving_processes() not in ([], [process])
    assert receiving_processes() == []


async def test_what_receives_is_there_before_the_first_lane(lane: TlsBulkLane) -> None:
    async with make_lane().running() as consumer:
        assert receiving_processes() == []
        consumer.prepare()
        consumer.prepare()
        (process,) = receiving_processes()
        await open_lane(lane, Sink(), consumer=consumer)
        assert receiving_processes() == [process]


async def test_a_lane_that_is_cancelled_at_birth_still_tells_its_sink() -> None:
    sink = Sink()
    async with make_lane(BulkSettings(host=HOST)).running() as provider, make_lane().running() as consumer:
        await consumer.connect(HOST, offered(provider), sink)
        # no checkpoint between here and the end: the lane's task has not run yet
    assert sink.closed == 1


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(UsageError):
        async with make_lane(BulkSettings(host=HOST)).running():
            raise UsageError("the body's own")


# --- listening ---------------------------------------------------------------------------------------------------------------


async def test_without_a_bulk_port_there_is_no_offer() -> None:
    async with make_lane().running() as lane:
        assert lane.port is None
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_ipv6_carries_a_block(host: str) -> None:
    try:
        lane = make_lane(BulkSettings(host=host))
        async with lane.running():
            cid, data = block(1)
            sink = Sink((cid, data))
            senders: list[BulkSender] = []
            offer = lane.offer(PEER, Source((cid, data)), want_sender=senders.append)
            assert offer is not None
            await lane.connect("::1", offer, sink)
            await until(lambda: len(senders) == 1)
            senders[0].send_blocks([cid])
            await until(lambda: len(sink.received) == 1)
    except ListenError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("this machine has no IPv6")
        raise


@pytest.mark.parametrize("host", ["192.0.2.1", "localhost"])
async def test_an_address_that_is_not_ours_is_a_listen_error(host: str) -> None:
    with pytest.raises(ListenError):
        async with make_lane(BulkSettings(host=host)).running():
            pass


async def test_a_port_in_use_is_a_listen_error(lane: TlsBulkLane) -> None:
    assert lane.port is not None
    with pytest.raises(ListenError):
        async with make_lane(BulkSettings(host=HOST, port=lane.port)).running():
            pass


def test_every_identity_is_new_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert make_identity().fingerprint != make_identity().fingerprint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_only_lanes_within_the_machine_give_up_the_congestion_control_that_it_is_set_to() -> None:
    with socket.socket() as any_other, listen("::", 0) as wide, listen("127.0.0.1", 0) as within:
        usual, of_wide, of_within = (
            listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            for listener in (any_other, wide, within)
        )
    assert (of_wide, of_within) == (usual, b"reno")


async def test_no_session_is_ever_resumed(lane: TlsBulkLane) -> None:
    context, port = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), lane.port
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def handshake(session: ssl.SSLSession | None, *words: bytes) -> tuple[ssl.SSLSession | None, bool | None]:
        with context.wrap_socket(socket.create_connection((HOST, port)), session=session) as connection:
            for word in words:
                connection.sendall(word)
                assert connection.recv(len(MAGIC)) == MAGIC  # behind it come the tickets, if there are any
            return connection.session, connection.session_reused

    session, _ = await trio.to_thread.run_sync(handshake, None, greeting(offered(lane)))
    assert await trio.to_thread.run_sync(handshake, session) == (mock.ANY, False)
