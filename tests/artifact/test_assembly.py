"""What is missing of an artifact, in whatever order nodes and blocks arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.artifact.assembly import Assembly
from p2pkv.artifact.build import ArtifactBuilder, Terms
from p2pkv.artifact.read import open_manifest
from p2pkv.errors import IntegrityError
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import Dtype, layer_bytes
from p2pkv.limits import SEGMENT_TOKENS
from tests.support.artifacts import NOW, PUBLISHER, Sample, make_sample, model

SAMPLE = make_sample(list(range(600)))
NODES = SAMPLE.artifact.manifest.segments


def node(index: int, sample: Sample = SAMPLE) -> tuple[Cid, bytes]:
    cid = sample.artifact.manifest.segments[index]
    return cid, sample.blocks[cid]


def blocks_of(index: int) -> list[Cid]:
    return [ref.cid for ref in SAMPLE.artifact.open_segment(index, node(index)[1]).blocks()]


def test_at_first_all_nodes_are_missing_in_order_and_nothing_is_held() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    assert list(assembly.missing_nodes) == list(NODES)
    assert assembly.segment_count == 3
    assert not assembly.complete
    assert list(assembly.held()) == []
    assert assembly.usable() == (0, 0)
    assert (assembly.done_bytes, assembly.total_bytes) == (0, 0)


@pytest.mark.parametrize(("hit", "segments"), [(1, 1), (256, 1), (257, 2), (512, 2), (600, 3)])
def test_only_the_segments_of_the_hit_are_wanted(hit: int, segments: int) -> None:
    assembly = Assembly(SAMPLE.artifact, hit)
    assert list(assembly.missing_nodes) == list(NODES[:segments])
    for index in range(segments):
        assembly.add_node(*node(index))
        for cid in blocks_of(index):
            assembly.add_block(cid)
    assert assembly.complete
    assert assembly.usable() == (segments, hit)
    assert assembly.add_node(*node(2)) == []


def test_a_node_tells_its_blocks_once() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    refs = assembly.add_node(*node(1))
    assert [(index, ref.cid) for index, ref in refs] == [(1, cid) for cid in blocks_of(1)]
    assert list(assembly.missing_nodes) == [NODES[0], NODES[2]]
    assert assembly.total_bytes == sum(ref.size for _, ref in refs)
    assert assembly.add_node(*node(1)) == []
    assert assembly.total_bytes == sum(ref.size for _, ref in refs)


def test_a_node_of_other_bytes_is_refused_and_stays_missing() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    cid, data = node(0)
    with pytest.raises(IntegrityError):
        assembly.add_node(cid, data[:-1])
    assert list(assembly.missing_nodes) == list(NODES)
    assert assembly.add_node(cid, data)


def test_a_segment_is_complete_with_its_last_block() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    refs = assembly.add_node(*node(0))
    first, last = blocks_of(0)
    assert assembly.add_block(first) == []
    assert not assembly.is_complete(0)
    assert assembly.done_bytes == refs[0][1].size
    assert assembly.add_block(last) == [0]
    assert assembly.is_complete(0)
    assert assembly.add_block(last) == []
    assert assembly.done_bytes == assembly.total_bytes


def test_a_segment_is_its_node_and_its_blocks_in_order_as_long_as_it_lives() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    for index in (2, 0):
        assembly.add_node(*node(index))
    told = {index: (NODES[index], *blocks_of(index)) for index in (0, 2)}
    assert {index: assembly.blocks(index) for index in told} == told
    for index, (_, *blocks) in told.items():
        for cid in blocks:
            assembly.add_block(cid)
        assert assembly.blocks(index) == told[index]  # also when nothing of it is missing any more


def test_a_gap_ends_what_is_usable() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    for index in (0, 2):
        assembly.add_node(*node(index))
        for cid in blocks_of(index):
            assembly.add_block(cid)
    assert list(assembly.held()) == [0, 2]
    assert assembly.usable() == (1, 256)
    assert not assembly.complete


def test_a_block_that_is_unknown_changes_nothing() -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    assert assembly.add_block(blocks_of(0)[0]) == []
    assert assembly.done_bytes == 0
    assembly.add_node(*node(0))
    assert not assembly.is_complete(0)  # the node names it, and it has to be told again
    assert [assembly.add_block(cid) for cid in blocks_of(0)] == [[], [0]]


def repeating() -> Sample:
    """Two segments whose layers are all zero: four times the same block."""
    written: dict[Cid, bytes] = {}
    description = model()
    builder = ArtifactBuilder(description, range(2 * SEGMENT_TOKENS), lambda cid, data: written.__setitem__(cid, bytes(data)))
    for _ in range(2):
        builder.add_segment([bytes(layer_bytes(layer, SEGMENT_TOKENS, Dtype.BF16)) for layer in description.layers])
    manifest = builder.finish(Terms(PUBLISHER, 1, NOW), {})
    return Sample(open_manifest(Cid.of_node(b""), manifest), written)


def test_a_block_that_several_segments_share_counts_for_all_of_them() -> None:
    sample = repeating()
    assembly = Assembly(sample.artifact, 2 * SEGMENT_TOKENS)
    refs = [*assembly.add_node(*node(0, sample)), *assembly.add_node(*node(1, sample))]
    (cid,) = {ref.cid for _, ref in refs}
    assert [assembly.blocks(index) for index in (0, 1)] == [(segment, cid) for segment in sample.artifact.manifest.segments]
    assert assembly.total_bytes == refs[0][1].size
    assert assembly.add_block(cid) == [0, 1]
    assert assembly.complete
    assert assembly.done_bytes == assembly.total_bytes


def test_a_shared_block_that_is_here_before_the_second_node_is_told_again() -> None:
    sample = repeating()
    assembly = Assembly(sample.artifact, 2 * SEGMENT_TOKENS)
    ((_, ref), *_) = assembly.add_node(*node(0, sample))
    assert assembly.add_block(ref.cid) == [0]
    assembly.add_node(*node(1, sample))
    assert list(assembly.held()) == [0]
    assert assembly.add_block(ref.cid) == [1]
    assert assembly.complete
    assert assembly.done_bytes == assembly.total_bytes


def shuffled_arrivals(rng: random.Random) -> Iterator[tuple[int, Cid | None]]:
    """Yield (segment, None) for its node and then (segment, block) in an order in which nodes come before their blocks."""
    ready: list[tuple[int, Cid | None]] = [(index, None) for index in range(3)]
    while ready:
        index, cid = ready.pop(rng.randrange(len(ready)))
        yield index, cid
        if cid is None:
            ready += [(index, block) for block in blocks_of(index)]


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_order_completes_every_segment_once(rng: random.Random) -> None:
    assembly = Assembly(SAMPLE.artifact, 600)
    completed: list[int] = []
    for index, cid in shuffled_arrivals(rng):
        if cid is None:
            assembly.add_node(*node(index))
        else:
            completed += assembly.add_block(cid)
        assert list(assembly.held()) == sorted(completed)
        segments, tokens = assembly.usable()
        assert all(index in completed for index in range(segments))
        assert tokens == min(segments * SEGMENT_TOKENS, 600)
    assert sorted(completed) == [0, 1, 2]
    assert assembly.complete
    assert assembly.done_bytes == assembly.total_bytes


# --- slices and order -----------------------------------------------------------------------------------------------------


DEEP = make_sample(list(range(600)), description=model(layers=4))


def deep_blocks(index: int, layers: range) -> list[Cid]:
    opened = DEEP.artifact.open_segment(index, node(index, DEEP)[1])
    return [ref.cid for layer in layers for ref in opened.layers[layer]]


def test_only_the_wanted_layers_are_wanted_named_and_counted() -> None:
    assembly = Assembly(DEEP.artifact, 512, layers=range(1, 3))
    refs = assembly.add_node(*node(0, DEEP))
    wanted = deep_blocks(0, range(1, 3))
    assert [ref.cid for _, ref in refs] == wanted
    assert assembly.blocks(0) == (DEEP.artifact.manifest.segments[0], *wanted)
    assert set(assembly.others(0)) == {*deep_blocks(0, range(1)), *deep_blocks(0, range(3, 4))}
    assert assembly.total_bytes == sum(len(DEEP.blocks[cid]) for cid in wanted)
    assert all(assembly.names(cid) for cid in deep_blocks(0, range(4)))  # others of the same artifact are known by them
    assert not assembly.all_layers
    for cid in deep_blocks(0, range(1)):
        assert assembly.add_block(cid) == []
    assert assembly.done_bytes == 0
    assert [assembly.add_block(cid) for cid in wanted] == [[], [0]]
    assert assembly.usable() == (1, 256)


def test_all_layers_leave_no_others() -> None:
    for layers in (None, range(4)):
        assembly = Assembly(DEEP.artifact, 600, layers=layers)
        assembly.add_node(*node(0, DEEP))
        assert assembly.all_layers
        assert not assembly.others(0)


def test_a_block_that_a_wanted_layer_shares_with_another_is_no_other() -> None:
    sample = repeating()
    assembly = Assembly(sample.artifact, SEGMENT_TOKENS, layers=range(1))
    ((_, ref),) = assembly.add_node(*node(0, sample))
    assert not assembly.others(0)
    assert assembly.add_block(ref.cid) == [0]


def test_in_order_a_segment_waits_for_those_before_it() -> None:
    assembly = Assembly(SAMPLE.artifact, 600, in_order=True)
    handed = []
    for index in (2, 0, 1):
        assembly.add_node(*node(index))
        handed.append([found for cid in blocks_of(index) for found in assembly.add_block(cid)])
    assert handed == [[], [0], [1, 2]]
    assert list(assembly.held()) == [0, 1, 2]


@settings(deadline=None)
@given(
    segments=st.integers(1, 3),
    bounds=st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda bounds: bounds[0] < bounds[1]),
    in_order=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_slice_in_any_order_is_handed_over_once_and_at_once(
    segments: int, bounds: tuple[int, int], in_order: bool, seed: int
) -> None:
    """Nodes and blocks arrive in any order, those that were not wanted among them, and some twice."""
    layers, rng = range(*bounds), random.Random(seed)
    assembly = Assembly(DEEP.artifact, min(segments * SEGMENT_TOKENS, 600), layers=layers, in_order=in_order)
    missing = {index: set(deep_blocks(index, layers)) for index in range(segments)}
    wanted = set().union(*missing.values())
    arriving: list[tuple[int, Cid | None]] = [(index, None) for index in range(segments)]
    handed: list[int] = []
    while arriving:
        index, cid = arriving.pop(rng.randrange(len(arriving)))
        if cid is None:
            assert {ref.cid for _, ref in assembly.add_node(*node(index, DEEP))} == missing[index]
            arriving += [(index, block) for block in deep_blocks(index, range(4))]
            continue
        now = assembly.add_block(cid)
        arriving += [(index, cid)] * (rng.random() < 0.1)
        missing[index].discard(cid)
        complete = [number for number in range(segments) if not missing[number]]
        due = [number for number in complete if complete[: number + 1] == list(range(number + 1))] if in_order else complete
        assert now == [number for number in due if number not in handed]
        handed += now
        assert list(assembly.held()) == complete
        assert all(assembly.blocks(n) == (node(n, DEEP)[0], *deep_blocks(n, layers)) for n in now)
    assert sorted(handed) == list(range(segments))
    assert not in_order or handed == sorted(handed)
    assert assembly.complete
    assert assembly.done_bytes == assembly.total_bytes == sum(len(DEEP.blocks[cid]) for cid in wanted)
