"""Random writes, damage, reads, index changes, restarts and kills against a model: never a wrong byte, nothing lost."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.store import Store, open_store
from p2pkv.store.stored_blocks import StoredBlocks
from tests.store.builders import Artifact, make_artifact, tokens

ARTIFACTS = [make_artifact(tokens(3)), make_artifact(tokens(3, 9)), make_artifact(tokens(1)), make_artifact(tokens(2, seed=1))]
BLOCKS = {cid: data for artifact in ARTIFACTS for cid, data in artifact.blocks.items()}
PACK_BYTES = 20_000  # a few of these blocks
UNIT = 64
a_block = st.sampled_from(list(BLOCKS))
an_artifact = st.sampled_from(ARTIFACTS)


@dataclass
class Record:
    """A record as it was appended; ``file`` and ``offset`` are where the store put it."""

    cid: Cid
    file: str
    offset: int
    good: bool = True


class StoreStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.home = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.opened = ExitStack()
        self.records: list[Record] = []  # those not buried, in the order of the packs
        self.current: dict[Cid, Record] = {}
        self.known: dict[Cid, Artifact] = {}
        self.held: dict[Cid, set[int]] = {}

    @initialize()
    def start(self) -> None:
        opened = self.opened.enter_context(open_store(self.home))
        self.blocks = BlockPacks(opened.layout.blocks, max_pack_bytes=PACK_BYTES)
        self.store = Store(opened.layout, self.blocks, opened.database)
        self.current = {record.cid: record for record in self.records}
        assert set(os.listdir(self.blocks_folder)) == {record.file for record in self.records}

    @rule()
    def restart(self) -> None:
        self.blocks.close()
        self.opened.close()
        self.start()

    @rule(torn=st.integers(0, 10_000))
    def kill(self, torn: int) -> None:
        """End without a word, with up to ``torn`` bytes of the last record missing."""
        last = self.records[-1] if self.records else None
        if self.blocks._current is not None:
            path = self.blocks_folder / self.blocks._current.name
            if torn and last is not None and last.file == path.name:
                size = len(BLOCKS[last.cid])
                os.truncate(path, last.offset + max(size - torn, -UNIT))
                self.records.pop()
            self.blocks._current.close()
        self.opened.close()
        self.start()

    @rule()
    def make_ready(self) -> None:
        self.blocks.make_ready()

    @rule(cid=a_block)
    def write(self, cid: Cid) -> None:
        self.store.write(cid, BLOCKS[cid])
        location = self.store.locate(cid)
        assert location is not None
        self.records.append(Record(cid, location.file, location.offset))
        self.current[cid] = self.records[-1]

    @rule(cid=a_block, wrong=st.binary(min_size=1, max_size=2000))
    def damage(self, cid: Cid, wrong: bytes) -> None:
        record, data = self.current.get(cid), BLOCKS[cid]
        if record is not None and record.good and data[: len(wrong)] != wrong[: len(data)]:
            with (self.blocks_folder / record.file).open("r+b") as file:
                file.seek(record.offset)
                file.write(wrong[: len(data)])
            record.good = False

    @rule(cid=a_block, into=st.booleans())
    def read(self, cid: Cid, into: bool) -> None:
        record = self.current.get(cid)
        if record is None:
            with pytest.raises(NotFoundError):
                self.read_one(cid, into)
        elif record.good:
            assert self.read_one(cid, into) == BLOCKS[cid]
        else:
            with pytest.raises(IntegrityError):
                self.read_one(cid, into)
            del self.current[cid]
            self.records = [other for other in self.records if other is not record]

    def read_one(self, cid: Cid, into: bool) -> bytes:
        if not into:
            return self.store.read(cid)
        buffer = bytearray(len(BLOCKS[cid]))
        assert self.store.read_into(cid, buffer) == len(buffer)
        return bytes(buffer)

    @property
    def blocks_folder(self) -> Path:
        return self.store.layout.blocks

    @rule(artifact=an_artifact, held=st.sets(st.integers(0, 3)), durable=st.booleans())
    def add_artifact(self, artifact: Artifact, held: set[int], durable: bool) -> None:
        positions = {position for position in held if position < len(artifact.segments)}
        self.store.index.add_artifact(artifact.opened, positions, durable=durable)
        if artifact.manifest_cid not in self.known:
            self.known[artifact.manifest_cid] = artifact
            self.held[artifact.manifest_cid] = {
                position
                for other, positions_held in self.held.items()
                for position in positions_held
                if artifact.manifest.segments[position : position + 1]
                == self.known[other].manifest.segments[position : position + 1]
            }
        self.hold(artifact, positions)

    @rule(artifact=an_artifact, position=st.integers(0, 3))
    def mark_held(self, artifact: Artifact, position: int) -> None:
        if artifact.manifest_cid in self.known:
            self.store.index.mark_held(artifact.manifest_cid, [position])
            self.hold(artifact, {position})
        else:
            with pytest.raises(NotFoundError):
                self.store.index.mark_held(artifact.manifest_cid, [position])

    @rule(artifact=an_artifact)
    def remove_artifact(self, artifact: Artifact) -> None:
        known = self.known.pop(artifact.manifest_cid, None) is not None
        self.held.pop(artifact.manifest_cid, None)
        assert self.store.index.remove_artifact(artifact.manifest_cid) is known

    def hold(self, artifact: Artifact, positions: set[int]) -> None:
        nodes = {artifact.manifest.segments[position] for position in positions if position < len(artifact.segments)}
        for cid, other in self.known.items():
            self.held[cid] |= {position for position, node in enumerate(other.manifest.segments) if node in nodes}

    @invariant()
    def blocks_are_those_written(self) -> None:
        assert {cid for cid in BLOCKS if self.store.has(cid)} == set(self.current)
        statistics = self.store.statistics()
        assert (statistics.blocks, statistics.bytes) == (len(self.current), sum(len(BLOCKS[cid]) for cid in self.current))

    @invariant()
    def readers_see_what_the_next_start_sees(self) -> None:
        lying = StoredBlocks(self.blocks_folder)
        places = {record.cid: (record.file, record.offset, len(BLOCKS[record.cid])) for record in self.records}
        assert {cid: lying.locate(cid) for cid in BLOCKS if lying.has(cid)} == places

    @invariant()
    def the_index_says_what_it_was_told(self) -> None:
        rows = {row.manifest_cid: row.complete for row in self.store.index.artifacts()}
        assert rows == {cid: len(self.held[cid]) == len(artifact.segments) for cid, artifact in self.known.items()}
        for artifact in ARTIFACTS:
            shared = {
                cid: sum(one == two for one, two in zip(artifact.keys, other.keys, strict=False))
                for cid, other in self.known.items()
            }
            matches = self.store.index.match(artifact.keys)
            assert {match.manifest: match.matched for match in matches} == {cid: n for cid, n in shared.items() if n}
            assert [match.matched for match in matches] == sorted((match.matched for match in matches), reverse=True)
            for match in matches:
                assert {position for position in range(match.segments) if match.holds(position)} == self.held[match.manifest]

    def teardown(self) -> None:
        self.blocks.close()
        self.opened.close()
        self.stack.close()


StoreStates.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestStoreStates = StoreStates.TestCase
