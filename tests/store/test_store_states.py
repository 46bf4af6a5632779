"""Random writes, damage, reads, index changes and restarts against a model: never a wrong byte, nothing committed is lost."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.store.store import open_store
from tests.store.builders import Artifact, make_artifact, tokens

ARTIFACTS = [make_artifact(tokens(3)), make_artifact(tokens(3, 9)), make_artifact(tokens(1)), make_artifact(tokens(2, seed=1))]
BLOCKS = {cid: data for artifact in ARTIFACTS for cid, data in artifact.blocks.items()}
a_block = st.sampled_from(list(BLOCKS))
an_artifact = st.sampled_from(ARTIFACTS)


class StoreStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.home = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.opened = ExitStack()
        self.good: set[Cid] = set()
        self.damaged: set[Cid] = set()
        self.known: dict[Cid, Artifact] = {}
        self.held: dict[Cid, set[int]] = {}

    @initialize()
    def start(self) -> None:
        self.store = self.opened.enter_context(open_store(self.home))

    @rule()
    def restart(self) -> None:
        self.opened.close()
        self.start()

    @rule(cid=a_block, durable=st.booleans())
    def write(self, cid: Cid, durable: bool) -> None:
        self.store.blocks.write(cid, BLOCKS[cid], durable=durable)
        self.good.add(cid)
        self.damaged.discard(cid)

    @rule(cid=a_block, wrong=st.binary(max_size=2000))
    def damage(self, cid: Cid, wrong: bytes) -> None:
        if cid in self.good and wrong != BLOCKS[cid]:
            Path(self.store.blocks.path(cid)).write_bytes(wrong)
            self.good.discard(cid)
            self.damaged.add(cid)

    @rule(cid=a_block, mapped=st.booleans())
    def read(self, cid: Cid, mapped: bool) -> None:
        read = self.store.read_mapped if mapped else self.store.read
        if cid in self.good:
            assert read(cid) == BLOCKS[cid]
        elif cid in self.damaged:
            with pytest.raises(IntegrityError):
                read(cid)
            self.damaged.discard(cid)
        else:
            with pytest.raises(NotFoundError):
                read(cid)

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
    def files_are_those_written(self) -> None:
        assert {cid for cid in BLOCKS if self.store.has(cid)} == self.good | self.damaged
        assert self.store.statistics().blocks == len(self.good | self.damaged)

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
        self.opened.close()
        self.stack.close()


StoreStates.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestStoreStates = StoreStates.TestCase
