"""A plain py-libp2p stream with the library's own settings: Noise and yamux over TCP; nothing is hashed.

The connection is there before the clock starts; the stream is opened on it. It is written and read by the MiB: smaller
pieces are slower.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from bench.transfer.peers import talk

_PROTOCOL: Final = TProtocol("/p2pkv-bench/plain/1")
_LISTEN: Final = Multiaddr(f"/ip4/{talk.HOST}/tcp/0")


async def seed(host: IHost, data: bytes) -> None:
    async def send(stream: INetStream) -> None:
        await stream.read(1)
        for start in range(0, len(data), talk.READ_BYTES):
            await stream.write(data[start : start + talk.READ_BYTES])
        await stream.close()

    host.set_stream_handler(_PROTOCOL, send)
    talk.say(address=str(host.get_addrs()[0]))
    await trio.to_thread.run_sync(talk.stay)


async def receive(host: IHost, address: str, size: int) -> None:
    peer = info_from_p2p_addr(Multiaddr(address))
    await host.connect(peer)
    talk.say(held_bytes=size)
    await trio.to_thread.run_sync(talk.hear, "go")
    watch = talk.Stopwatch()
    stream = await host.new_stream(peer.peer_id, [_PROTOCOL])
    await stream.write(b"g")
    chunks: list[bytes] = []
    left = size
    while left:
        try:
            chunk = await stream.read(talk.READ_BYTES)
        except StreamEOF:
            break
        watch.first_byte()
        chunks.append(chunk)
        left -= len(chunk)
    talk.say(**watch.result())
    await trio.to_thread.run_sync(talk.hear, "verify")
    talk.say(digest=talk.digest(chunks))


async def run(role: str, arguments: list[str]) -> None:
    host = new_host()
    async with host.run([_LISTEN]):
        if role == "seed":
            await seed(host, await trio.Path(arguments[0]).read_bytes())
        else:
            (seeder,) = json.loads(arguments[0])
            await receive(host, seeder["address"], int(arguments[1]))
        talk.leave()


if __name__ == "__main__":
    trio.run(run, sys.argv[1], sys.argv[2:])
