"""Packs of the consumer's home that are damaged, cut off or gone, while its daemon runs and between two runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pkv.formats.cid import Cid, Codec
from p2pkv.store.home import HomeLayout
from p2pkv.store.pack import ALIGNMENT, Contents, Record, read_contents
from tests.integration.conftest import SHARED, Ask, provide
from tests.support.crafted import Pieces
from tests.support.stores import block_location, cut_off, flip_block, flip_file, tampering
from tests.support.town import Town

# Where a bit may flip that is no block's, as a byte of the pack: of its head, of a record's header, and of the table.
PLACES: dict[str, Callable[[Contents, Record], int]] = {
    "magic": lambda contents, record: 3,
    "salt": lambda contents, record: 11,
    "record-tag": lambda contents, record: record.offset - ALIGNMENT,
    "record-codec": lambda contents, record: record.offset - ALIGNMENT + 5,
    "record-cid": lambda contents, record: record.offset - ALIGNMENT + 20,
    "record-size": lambda contents, record: record.offset - ALIGNMENT + 4 + 36,
    "record-size-by-one": lambda contents, record: record.offset - ALIGNMENT + 4 + 36 + 3,
    "table-cid": lambda contents, record: contents.end + 20,
    "table-offset": lambda contents, record: contents.end + 36 + 7,
    "table-size": lambda contents, record: contents.end + 36 + 8 + 3,
    "table-tag": lambda contents, record: -ALIGNMENT,
    "table-count": lambda contents, record: -ALIGNMENT + 7,
    "table-digest": lambda contents, record: -ALIGNMENT + 8 + 5,
}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "as-a-killed-daemon-leaves-it"])
async def test_a_bit_of_what_describes_a_pack_costs_blocks_at_most(
    town: Town, tmp_path: Path, pieces: Pieces, ask: Ask, sealed: bool
) -> None:
    provider = await provide(town, "provider", pieces)
    _, blocks = pieces.signed()
    victim = pieces.cids(Codec.RAW)[5]
    consumer = await town.start("consumer", mirror=False)
    assert (await ask(consumer)).hit_tokens == SHARED
    await consumer.stop()
    for name, place in PLACES.items():
        if not sealed and name.startswith("table"):
            continue
        # Another node each time: peers listen to one that starts again and again only so often.
        home = shutil.copytree(consumer.home, tmp_path / name, ignore=shutil.ignore_patterns("keys"))
        pack, location = block_location(home, victim)
        contents = contents_of(pack)
        assert contents.sealed
        if not sealed:
            os.truncate(pack, contents.end)
        flip_file(pack, 8 * place(contents, Record(victim.binary, location.offset, location.size)))
        other = await town.start(name, mirror=False)
        report = await ask(other)
        assert report.hit_tokens == SHARED, name
        assert report.bytes_by_peer.keys() <= {provider.peer_id}, name
        # The table spares the records, and they spare the table; nobody reads a pack that begins as another kind of file does.
        if name != "magic" and (sealed or name == "salt"):
            assert report.bytes_fetched == 0, name
        assert all(other.node.store.read(cid) == data for cid, data in blocks.items()), name
        await other.stop()


def contents_of(pack: Path) -> Contents:
    with pack.open("rb") as file:
        return read_contents(file.fileno())


@pytest.mark.parametrize("running", [True, False], ids=["under-a-running-daemon", "between-two-runs"])
@pytest.mark.parametrize("damage", ["cut-off", "empty", "gone", "a bit of the manifest"])
async def test_a_pack_that_is_cut_off_or_gone(town: Town, pieces: Pieces, ask: Ask, damage: str, running: bool) -> None:
    await provide(town, "provider", pieces)
    consumer = await town.start("consumer")
    assert (await ask(consumer)).hit_tokens == SHARED
    if not running:
        await consumer.stop()
    harm(consumer.home, pieces, damage)
    if not running:
        consumer = await town.start("consumer")
    report = await ask(consumer)
    assert report.hit_tokens == SHARED
    assert report.bytes_fetched > 0
    again = await ask(consumer)
    assert (again.hit_tokens, again.bytes_fetched) == (SHARED, 0)


@pytest.mark.parametrize("damage", ["cut-off", "empty", "gone"])
async def test_a_pack_that_is_harmed_between_the_daemons_check_and_the_clients(
    town: Town, pieces: Pieces, ask: Ask, damage: str
) -> None:
    """The client asks once more, and neither process minds: a mapping of such a file would have ended the client's."""
    await provide(town, "provider", pieces)
    last = pieces.cids(Codec.RAW)[-1]
    armed = False

    def strike(cid: Cid, data: bytes) -> bytes:
        nonlocal armed
        if armed and cid == last:  # the daemon has not told of its segment yet, whatever the order of the others
            armed = False
            if damage == "cut-off":
                cut_off(consumer.home, last)
            else:
                harm(consumer.home, pieces, damage)
        return data

    consumer = await town.start("consumer", serve_from=tampering(strike))
    assert (await ask(consumer)).hit_tokens == SHARED
    armed = True
    report = await ask(consumer)
    assert not armed
    assert report.hit_tokens == SHARED
    assert report.bytes_fetched > 0


def harm(home: Path, pieces: Pieces, damage: str) -> None:
    """Damage the pack that holds the artifact's blocks."""
    if damage == "cut-off":
        cut_off(home, pieces.cids(Codec.RAW)[5])
        return
    if damage == "a bit of the manifest":
        flip_block(home, pieces.signed()[0].cid, 77)
        return
    for pack in HomeLayout(home).blocks.iterdir():
        pack.unlink() if damage == "gone" else os.truncate(pack, 0)


async def test_a_consumer_that_is_idle_is_ready_and_its_next_fetch_is_right(town: Town, pieces: Pieces, ask: Ask) -> None:
    """The pack is as long as it may become and holds nothing; what is fetched then begins at its start."""
    await provide(town, "provider", pieces)
    consumer = await town.start("consumer")
    while consumer.node.store.blocks.make_ready():
        pass
    report = await ask(consumer)
    assert (report.hit_tokens, report.local_bytes) == (SHARED, 0)
    await consumer.stop()
    report = await ask(await town.start("consumer"))
    assert (report.hit_tokens, report.bytes_fetched) == (SHARED, 0)
