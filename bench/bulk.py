"""How fast the bulk lane moves blocks between processes: ``python -m bench.bulk``.

Sender processes offer a lane each; this process receives, checks every block's BLAKE3 and, with ``--files``, writes each
to a file of its own. Prints one JSON object; ``figures`` maps a name to a number: MiB/s of all senders together, and the
CPU seconds that the receiver and the senders spent on each GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from p2pkv.formats.cid import Cid
from p2pkv.ports import BulkOffer, BulkSender
from p2pkv.units import GIB, KIB, MIB
from p2pkv_node.bulk import BulkSettings, TlsBulkLane
from p2pkv_node.identity import peer_id_from_seed, signer_from_seed

HOST: Final = "127.0.0.1"
SEED: Final = bytes(32)  # of the consumer's key, which the senders have to know
DISTINCT_BLOCKS: Final = 32  # more would only measure the generator
ROOT: Final = Path(__file__).resolve().parent.parent


def make_blocks(seed: int, size: int) -> list[tuple[Cid, bytes]]:
    """Return blocks of incompressible bytes with their CIDs, the same for the same seed."""
    rng = random.Random(seed)
    return [(Cid.of_block(data), data) for data in (rng.randbytes(size) for _ in range(DISTINCT_BLOCKS))]


class MemorySource:
    """Gives blocks from memory."""

    def __init__(self, blocks: list[tuple[Cid, bytes]]) -> None:
        self.cids = [cid for cid, _ in blocks]
        self._blocks = dict(blocks)

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        data = self._blocks[cid]
        buffer[: len(data)] = data
        return len(data)

    def blocks_sent(self, sizes: Sequence[int]) -> None:
        """All were queued at once."""

    def lane_closed(self) -> None:
        """Seen in the statistics of the lane."""


async def send(seed: int, block_bytes: int, count: int) -> None:
    """Offer one lane on stdout, send ``count`` blocks over it, and stay until it closes."""
    source = MemorySource(make_blocks(seed, block_bytes))
    senders, receive_sender = trio.open_memory_channel[BulkSender](1)
    lane = TlsBulkLane(BulkSettings(host=HOST), sign=signer_from_seed(SEED))
    async with lane.running():
        offer = lane.offer(peer_id_from_seed(SEED), source, want_sender=senders.send_nowait)
        if offer is None:
            raise RuntimeError("a lane that runs makes its first offer")
        sys.stdout.write(json.dumps([offer.port, offer.token.hex(), offer.fingerprint.hex()]) + "\n")
        sys.stdout.flush()
        sender = await receive_sender.receive()
        sender.send_blocks([source.cids[number % DISTINCT_BLOCKS] for number in range(count)])
        while lane.statistics().sending_lanes:  # noqa: ASYNC110 - the port has no event for it, and a bench may poll
            await trio.sleep(0.01)


class VerifyingSink:
    """Checks every block and counts down; writes each to its own file where there is a folder."""

    def __init__(self, blocks: list[tuple[Cid, bytes]], count: int, folder: Path | None) -> None:
        self._sizes = {cid: len(data) for cid, data in blocks}
        self._left = count
        self._folder = folder
        self._token = trio.lowlevel.current_trio_token()
        self.done = trio.Event()
        self.failed = False

    def expected_size(self, cid: Cid) -> int | None:
        return self._sizes.get(cid)

    def receive_block(self, cid: Cid, data: memoryview) -> None:
        self.failed |= not cid.matches(data)
        if self._folder is not None:
            (self._folder / str(self._left)).write_bytes(data)
        self._left -= 1
        if not self._left:
            self._token.run_sync_soon(self.done.set)

    def lane_closed(self) -> None:
        self.failed |= not self.done.is_set()
        self.done.set()


async def receive(offers: list[BulkOffer], block_bytes: int, count: int, folder: Path | None) -> tuple[float, float]:
    """Return the seconds and the CPU seconds that ``count`` blocks from each offer took."""
    sinks: list[VerifyingSink] = []
    for seed in range(len(offers)):
        own = None if folder is None else folder / str(seed)
        if own is not None:
            own.mkdir()
        sinks.append(VerifyingSink(make_blocks(seed, block_bytes), count, own))
    async with TlsBulkLane(sign=signer_from_seed(SEED)).running() as lane:
        start, cpu_start = time.perf_counter(), time.process_time()
        lanes = [await lane.connect(HOST, offer, sink) for offer, sink in zip(offers, sinks, strict=True)]
        for sink in sinks:
            await sink.done.wait()
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        for receiver in lanes:
            receiver.close()
    if any(sink.failed for sink in sinks):
        raise RuntimeError("a block was wrong or missing")
    return elapsed, cpu


def measure(senders: int, total_bytes: int, block_bytes: int, folder: Path | None) -> dict[str, float]:
    """Run one measurement with fresh sender processes and return its figures."""
    count = total_bytes // block_bytes // senders
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "node")))}
    arguments = [sys.executable, "-m", "bench.bulk", "--block-bytes", str(block_bytes), "--count", str(count), "--seed"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = [
        subprocess.Popen([*arguments, str(seed)], stdout=subprocess.PIPE, text=True, env=environment)
        for seed in range(senders)
    ]
    try:
        offers = []
        for process in processes:
            if process.stdout is None:
                raise RuntimeError("stdout is a pipe")
            port, token, fingerprint = json.loads(process.stdout.readline())
            offers.append(BulkOffer(port, bytes.fromhex(token), bytes.fromhex(fingerprint)))
        elapsed, cpu = trio.run(receive, offers, block_bytes, count, folder)
        for process in processes:
            process.wait(10)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    moved = senders * count * block_bytes
    sender_cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # start-up included
    return {
        "mib_per_s": round(moved / MIB / elapsed, 1),
        "receiver_cpu_s_per_gib": round(cpu * GIB / moved, 2),
        "senders_cpu_s": round(sender_cpu, 2),
    }


def main() -> None:
    """Parse the arguments, measure with 1 and 4 senders, and print the JSON; with ``--seed``, be one of the senders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=192 * KIB)
    parser.add_argument("--files", nargs="?", const=tempfile.gettempdir(), help="also write blocks under this folder")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is not None:
        trio.run(send, options.seed, options.block_bytes, options.count)
        return
    figures: dict[str, float] = {}
    for senders in (1, 4):
        with tempfile.TemporaryDirectory(dir=options.files) as folder:
            measured = measure(senders, options.total_mib * MIB, options.block_bytes, Path(folder) if options.files else None)
        figures.update({f"bulk_{senders}_senders_{name}": value for name, value in measured.items()})
    sys.stdout.write(
        json.dumps({"bench": "bulk", "block_bytes": options.block_bytes, "files": bool(options.files), "figures": figures})
        + "\n"
    )


if __name__ == "__main__":
    main()
