"""iroh-blobs: one blob from one memory store to another over QUIC, verified by its BLAKE3 tree while it arrives.

The receiver's endpoint is bound before the clock starts; the connection is made on the clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import iroh.iroh_ffi as iroh

from bench.transfer.peers import talk


async def open_node() -> iroh.Iroh:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.BaseEventLoop), "asyncio's own"
    iroh.uniffi_set_event_loop(loop)
    options = iroh.NodeOptions(ipv4_addr=f"{talk.HOST}:0", node_discovery=iroh.NodeDiscoveryConfig.NONE)
    node: iroh.Iroh = await iroh.Iroh.memory_with_options(options)
    return node


class Added(iroh.AddCallback):
    """Hears how the blob is added, and keeps its hash."""

    hash: str | None = None

    async def progress(self, progress: iroh.AddProgress) -> None:
        match progress.type():
            case iroh.AddProgressType.ALL_DONE:
                self.hash = str(progress.as_all_done().hash)
            case iroh.AddProgressType.ABORT:
                raise RuntimeError(progress.as_abort().error)


class Received(iroh.DownloadCallback):
    """Hears how a download goes; a failure is told here and nowhere else."""

    def __init__(self, watch: talk.Stopwatch) -> None:
        self._watch = watch
        self.failure: str | None = None

    async def progress(self, progress: iroh.DownloadProgress) -> None:
        match progress.type():
            case iroh.DownloadProgressType.PROGRESS:
                self._watch.first_byte()
            case iroh.DownloadProgressType.ABORT:
                self.failure = progress.as_abort().error


async def seed(path: Path) -> None:
    node = await open_node()
    added = Added()
    await node.blobs().add_from_path(str(path), False, iroh.SetTagOption.auto(), iroh.WrapOption.no_wrap(), added)
    address = await node.net().node_addr()
    loopback = [known for known in address.direct_addresses() if known.startswith(talk.HOST)]
    talk.say(node=await node.net().node_id(), addresses=loopback, hash=added.hash)
    await asyncio.to_thread(talk.stay)


async def receive(seeders: list[dict[str, Any]], size: int, folder: Path) -> None:
    node = await open_node()
    addresses = [iroh.NodeAddr(iroh.PublicKey.from_string(seeder["node"]), None, seeder["addresses"]) for seeder in seeders]
    blob = iroh.Hash.from_string(seeders[0]["hash"])
    options = iroh.BlobDownloadOptions(iroh.BlobFormat.RAW, addresses, iroh.SetTagOption.auto())
    talk.say(held_bytes=size)  # a memory store
    await asyncio.to_thread(talk.hear, "go")
    watch = talk.Stopwatch()
    received = Received(watch)
    await node.blobs().download(blob, options, received)
    talk.say(**watch.result(), failure=received.failure)
    await asyncio.to_thread(talk.hear, "verify")
    output = folder / "blob"
    await node.blobs().write_to_path(blob, str(output))
    talk.say(digest=await asyncio.to_thread(partial(talk.file_digest, output)))


async def run(role: str, arguments: list[str]) -> None:
    if role == "seed":
        await seed(Path(arguments[0]))
    else:
        await receive(json.loads(arguments[0]), int(arguments[1]), Path(arguments[2]))
    talk.leave()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2:]))
