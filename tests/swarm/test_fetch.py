"""The fetch driver over simulated nodes in virtual time: no sockets, no threads, no sleeping."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from p2pkv.errors import ExpiredError, FetchIncompleteError, NotFoundError, UntrustedPublisherError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.tensors import Dtype
from p2pkv.ports import Buffer
from p2pkv.swarm.report import FetchEvent, Progress, SegmentReady
from p2pkv.swarm.target import ManifestTarget, PromptTarget
from sims.network import Link
from sims.store import MemoryBlockStore
from tests.support.artifacts import NOW, PUBLISHER, Sample, make_sample
from tests.support.sim_town import PROMPT, TOKENS, Town, prompt


def segment_blocks(sample: Sample, index: int) -> tuple[Cid, ...]:
    node = sample.artifact.manifest.segments[index]
    return (node, *(ref.cid for ref in sample.artifact.open_segment(index, sample.blocks[node]).blocks()))


async def test_a_segment_is_told_when_all_that_it_names_is_here(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    """Its node and every block, whether they were here or came: whoever hears of it may read them at once."""
    await town.provider("a", sample)
    consumer = await town.provider("c", sample, without=5, trusted=[PUBLISHER])
    seen: list[int] = []

    def read_all(event: FetchEvent) -> None:
        if isinstance(event, SegmentReady):
            assert all(consumer.store.read(cid) == sample.blocks[cid] for cid in event.blocks)
            seen.append(len(event.blocks))

    assert (await consumer.fetch(prompt(), emit=read_all)).hit_tokens == 600
    assert seen == [3, 3, 3]


async def test_a_prompt_that_goes_on_after_the_document_hits_all_of_it(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    await town.provider("a", sample)
    consumer = town.node("c", trusted=[PUBLISHER])
    events: list[FetchEvent] = []
    report = await consumer.fetch(prompt(), emit=events.append)
    assert report.hit_tokens == 600
    assert report.segments == 3
    told = {event.index: event.blocks for event in events if isinstance(event, SegmentReady)}
    assert told == {index: segment_blocks(sample, index) for index in (0, 1, 2)}
    assert all(consumer.store.read(cid) == data for cid, data in sample.blocks.items())


async def test_blocks_come_from_all_providers_and_none_twice(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    for name in "abd":
        await town.provider(name, sample, link=Link(up=100_000))
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert set(report.bytes_by_peer) == {"a", "b", "d"}
    assert report.duplicate_bytes == 0


async def test_a_document_shorter_than_a_segment_is_found_by_its_shared_length(autojump_clock: MockClock, town: Town) -> None:
    short = make_sample(TOKENS[:100])
    await town.provider("a", short)
    consumer = town.node("c", trusted=[PUBLISHER])
    assert (await consumer.fetch(prompt([*TOKENS[:100], 7, 8], shared=100))).hit_tokens == 100


async def test_a_longer_document_serves_the_prefix_that_is_shared(autojump_clock: MockClock, town: Town) -> None:
    long = make_sample(list(range(256 * 5)))
    await town.provider("a", long)
    tokens = [*range(256 * 3 + 10), 9, 9, 9]
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt(tokens))
    assert report.hit_tokens == 256 * 3


async def test_the_whole_prompt_published_leaves_its_last_step(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    assert (await town.node("c", trusted=[PUBLISHER]).fetch(prompt(TOKENS))).hit_tokens == 512


async def test_nobody_has_it(autojump_clock: MockClock, town: Town) -> None:
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.hit_tokens == 0
    assert report.artifact is None


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (prompt(dtype=Dtype.FP32), "model.dtype"),
        (PromptTarget(b"\x01" * 32, Dtype.BF16, tuple(PROMPT)), "trust.untrusted"),
    ],
)
async def test_a_refused_manifest_is_a_miss_with_a_reason(
    autojump_clock: MockClock, town: Town, sample: Sample, target: PromptTarget, code: str
) -> None:
    await town.provider("a", sample)
    consumer = town.node("c", trusted=[] if code == "trust.untrusted" else [PUBLISHER])
    report = await consumer.fetch(target)
    assert report.hit_tokens == 0
    assert [refusal.code for refusal in report.refusals] == [code]


async def test_an_untrusted_longer_match_gives_way_to_a_trusted_shorter_one(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    from nacl.signing import SigningKey

    stranger = make_sample(PROMPT[:602], key=SigningKey(b"\x09" * 32))
    await town.provider("a", stranger)
    await town.provider("b", sample)
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt([*PROMPT, 4, 5]))
    assert report.hit_tokens == 600
    assert [refusal.code for refusal in report.refusals] in ([], ["trust.untrusted"])


async def test_a_liar_is_dropped_and_the_fetch_goes_on(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample, link=Link(up=1_000_000))
    liar = await town.provider("liar", sample, link=Link(up=1_000_000))
    raw = [cid for cid in sample.blocks if cid.codec == 0x55]
    for cid in raw:
        flipped = bytes([sample.blocks[cid][0] ^ 1]) + sample.blocks[cid][1:]
        liar.store.damage(cid, flipped)
    liar.store.read = lambda cid: liar.store._blocks[cid]  # type: ignore[method-assign]  # a liar does not check
    consumer = town.node("c", trusted=[PUBLISHER])
    report = await consumer.fetch(prompt())
    assert report.hit_tokens == 600
    assert report.peers_dropped == ("liar",)
    assert report.blocks_refused == 1
    assert consumer.context.bans.banned("liar", trio.current_time())
    assert all(consumer.store.read(cid) == sample.blocks[cid] for cid in raw)


async def test_a_provider_with_damaged_blocks_says_so_and_is_no_liar(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    damaged = await town.provider("a", sample)
    await town.provider("b", sample)
    for cid in list(sample.blocks)[:3]:
        damaged.store.damage(cid, b"rotten")
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.hit_tokens == 600
    assert report.peers_dropped == ()


async def test_a_peer_that_dies_is_replaced(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample, link=Link(up=20_000))
    await town.provider("b", sample, link=Link(up=20_000))
    consumer = town.node("c", trusted=[PUBLISHER])
    killed = False

    def kill_one(event: FetchEvent) -> None:
        nonlocal killed
        if isinstance(event, SegmentReady) and not killed:
            killed = True
            town.world.kill("b")

    report = await consumer.fetch(prompt(), emit=kill_one)
    assert killed
    assert report.hit_tokens == 600
    assert report.peers_lost == 1


async def test_all_peers_dead_leaves_a_shorter_hit_and_resumes_later(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    await town.provider("a", sample, link=Link(up=20_000))
    consumer = town.node("c", trusted=[PUBLISHER])
    ready: list[int] = []
    told: list[str] = []

    def kill(event: FetchEvent) -> None:
        if isinstance(event, SegmentReady) and "a" in town.world.nodes:
            ready.append(event.index)
            town.world.kill("a")
        elif isinstance(event, Progress):
            told.append(event.detail)

    report = await consumer.fetch(prompt(), emit=kill)
    assert any(detail.startswith("nobody reachable has the ") for detail in told)
    assert report.hit_tokens == (256 if ready == [0] else 0)  # blocks as small as these are asked for in any order
    await town.provider("b", sample)
    again = await consumer.fetch(prompt())
    assert again.hit_tokens == 600
    assert again.local_bytes > 0
    assert sum(again.bytes_by_peer.values()) < sum(map(len, sample.blocks.values())) - again.local_bytes + 1


async def test_a_silent_peer_costs_its_patience_and_no_more(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    silent = await town.provider("silent", sample)
    never = trio.Event()
    silent.context.offload = lambda work: never.wait()  # type: ignore[assignment]  # hears all, answers nothing
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.hit_tokens == 600
    assert report.times["done_s"] < 10


async def silent_provider(town: Town, sample: Sample) -> None:
    """Start a provider that tells all about the artifact, and sends no block."""
    silent = await town.provider("silent", sample)
    reads = silent.store.read

    def read(cid: Cid) -> bytes:
        if cid.codec is Codec.RAW:
            raise trio.TooSlowError
        return reads(cid)

    async def offload(work: Callable[[], object]) -> object:
        try:
            return work()
        except trio.TooSlowError:
            return await trio.sleep_forever()

    silent.context.offload = offload  # type: ignore[assignment]
    silent.store.read = read  # type: ignore[method-assign]


async def test_silence_of_all_peers_ends_in_a_miss_and_not_in_patience(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    await silent_provider(town, sample)
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.hit_tokens == 0
    assert report.artifact is not None
    assert report.times["done_s"] < 5


@pytest.mark.parametrize(("impatient", "shortest", "longest"), [(True, 0, 5), (False, 60, 61)])
async def test_whoever_could_compute_as_well_does_not_wait_for_an_artifact_of_the_silent(
    autojump_clock: MockClock, town: Town, sample: Sample, impatient: bool, shortest: float, longest: float
) -> None:
    await silent_provider(town, sample)
    began = trio.current_time()
    with pytest.raises(FetchIncompleteError):
        await town.node("c", trusted=[PUBLISHER]).fetch(ManifestTarget(sample.cid, impatient=impatient), patience_s=60)
    assert shortest <= trio.current_time() - began < longest


async def test_everything_local_needs_no_network(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    consumer = await town.provider("c", sample, trusted=[PUBLISHER])
    report = await consumer.fetch(prompt(shared=600))
    assert report.hit_tokens == 600
    assert report.bytes_by_peer == {}


async def test_a_block_that_rotted_at_home_is_fetched_again(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    consumer = await town.provider("c", sample, trusted=[PUBLISHER])
    victim = next(cid for cid in sample.blocks if cid.codec == 0x55)
    consumer.store.damage(victim, bytes(len(sample.blocks[victim])))
    report = await consumer.fetch(prompt(shared=600))
    assert report.hit_tokens == 600
    assert sum(report.bytes_by_peer.values()) == len(sample.blocks[victim])
    assert consumer.store.read(victim) == sample.blocks[victim]


class RottingStore(MemoryBlockStore):
    """Loses ``victim`` after each of the first ``times`` writes of it."""

    def __init__(self, victim: Cid, times: int) -> None:
        super().__init__()
        self.victim = victim
        self.times = times

    def write(self, cid: Cid, data: Buffer) -> None:
        super().write(cid, data)
        if cid == self.victim and self.times:
            self.times -= 1
            self.damage(cid, b"rotten")


@pytest.mark.parametrize("part", ["manifest", "node"])
async def test_what_our_own_disk_lost_at_once_is_fetched_once_more(
    autojump_clock: MockClock, town: Town, sample: Sample, part: str
) -> None:
    victim = sample.cid if part == "manifest" else sample.artifact.manifest.segments[1]
    await town.provider("a", sample)
    report = await town.node("me", trusted=[PUBLISHER], store=RottingStore(victim, 1)).fetch(prompt(shared=600))
    assert (report.hit_tokens, report.refusals, report.blocks_refused) == (600, (), 0)
    report = await town.node("you", trusted=[PUBLISHER], store=RottingStore(victim, 2)).fetch(prompt(shared=600))
    assert report.hit_tokens == 0
    assert [refusal.code for refusal in report.refusals] == ["integrity.hash"]


async def test_a_mirror_fetches_by_manifest(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    mirror = town.node("m", trusted=[PUBLISHER])
    report = await mirror.fetch(ManifestTarget(sample.cid))
    assert report.hit_tokens == 600
    assert [match.manifest for match in mirror.catalog.match(list(sample.artifact.chain_keys))] == [sample.cid]


async def test_a_manifest_nobody_has(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    with pytest.raises(NotFoundError):
        await town.node("m", trusted=[PUBLISHER]).fetch(ManifestTarget(sample.cid))


async def test_a_manifest_target_tells_why_it_is_refused(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    with pytest.raises(UntrustedPublisherError):
        await town.node("m").fetch(ManifestTarget(sample.cid))
    old = make_sample(TOKENS, expires=NOW - 3600)
    await town.provider("b", old)
    with pytest.raises(ExpiredError):
        await town.node("n", trusted=[PUBLISHER]).fetch(ManifestTarget(old.cid))


async def test_a_partial_provider_leaves_the_rest_to_others_or_says_what_is_missing(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    ordered = sorted(sample.blocks.items(), key=lambda item: item[0].codec, reverse=True)  # nodes first
    partial = Sample(sample.artifact, dict(ordered))
    await town.provider("a", partial, without=2)
    mirror = town.node("m", trusted=[PUBLISHER])
    with pytest.raises(FetchIncompleteError):
        await mirror.fetch(ManifestTarget(sample.cid))
    await town.provider("b", sample)
    assert (await mirror.fetch(ManifestTarget(sample.cid))).hit_tokens == 600


@pytest.mark.parametrize("up", [100_000, 100_000_000])
async def test_nodes_behind_the_first_are_read_when_the_first_block_is_here_or_a_little_later(
    autojump_clock: MockClock, town: Town, sample: Sample, up: int
) -> None:
    await town.provider("a", sample, link=Link(up=up))
    steps: list[tuple[float, int, int]] = []  # time, bytes known to be wanted, bytes that are here

    def watch(event: FetchEvent) -> None:
        if isinstance(event, Progress) and event.total_bytes and event.total_bytes not in [step[1] for step in steps]:
            steps.append((trio.current_time(), event.total_bytes, event.done_bytes))

    await town.node("c", trusted=[PUBLISHER]).fetch(prompt(), emit=watch)
    assert len(steps) > 1
    (first, _, _), (second, _, done) = steps[:2]
    assert done or second - first == pytest.approx(0.02)
    assert bool(done) == (up == 100_000_000)
