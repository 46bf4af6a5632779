"""Bytes that change on their way: none reaches the model, whichever they are. A signature is enough for that."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from bench.trust.subject import Subject
from p2pkv import Client
from p2pkv.artifact.read import Artifact
from p2pkv.formats.cid import Cid, Codec
from tests.client.conftest import REPORT, ScriptedDaemon, Sealed, matched, segments
from tests.support.lies import signed_values
from tests.support.llama import cache_bytes, local_cache

Blocks = Mapping[Cid, bytes]
Tamper = Callable[[Cid, Blocks, random.Random], bytes]


def flip(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    """One bit."""
    data = bytearray(blocks[cid])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    return blocks[cid][: rng.randrange(1, len(blocks[cid]))]


def extend(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    return blocks[cid] + b"\0"


def swap_bytes(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    """Two unequal bytes in one another's place."""
    data = bytearray(blocks[cid])
    first = rng.randrange(len(data))
    second = next(i for i in range(len(data)) if data[i] != data[first])
    data[first], data[second] = data[second], data[first]
    return bytes(data)


def zero(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    return bytes(len(blocks[cid]))


def replay(cid: Cid, blocks: Blocks, rng: random.Random) -> bytes:
    """Another thing of the same artifact: a block for a block, mostly of another layer or segment, and of the same size."""
    data = blocks[cid]
    alike = [other for other in blocks if other.codec is cid.codec and blocks[other] != data]
    same_size = [other for other in alike if len(blocks[other]) == len(data)]
    others = same_size or alike or [other for other in blocks if other != cid]
    return blocks[rng.choice(others)]


TAMPERS: dict[str, Tamper] = {tamper.__name__: tamper for tamper in (flip, truncate, extend, swap_bytes, zero, replay)}


def wrong(sealed: Sealed, cids: list[Cid], tamper: Tamper, rng: random.Random) -> dict[Cid, bytes]:
    blocks = sealed[1]
    return {cid: tamper(cid, blocks, rng) if cid in cids else data for cid, data in blocks.items()}


@pytest.fixture(scope="package")
def sealed(honest: Subject) -> Sealed:
    return signed_values(honest.model, honest.token_ids, honest.honest)


@pytest.fixture(scope="package")
def expected(honest: Subject) -> bytes:
    return cache_bytes(local_cache(honest.model, prompt_of(honest), honest.tokens))


def prompt_of(honest: Subject) -> list[int]:
    return [*honest.token_ids, 7, 8, 9]


def targets(sealed: Sealed) -> dict[str, list[Cid]]:
    """Return what is tampered with in one go: the manifest, each segment's node, and blocks of each."""
    artifact: Artifact = sealed[0]
    raw = [cid for cid in sealed[1] if cid.codec is Codec.RAW]
    found = {"manifest": [artifact.cid], "all-blocks": raw}
    for index, node in enumerate(artifact.manifest.segments):
        found[f"node-{index}"] = [node]
    found |= {f"block-{index}": [raw[index]] for index in (0, len(raw) // 2, len(raw) - 1)}
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TAMPERS)
def test_no_changed_byte_reaches_the_model(
    tmp_path: Path, honest: Subject, sealed: Sealed, expected: bytes, name: str
) -> None:
    rng = random.Random(name)
    for what, cids in targets(sealed).items():
        daemon = ScriptedDaemon(tmp_path / what)
        daemon.hold(wrong(sealed, cids, TAMPERS[name], rng))
        daemon.scripts += [[matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]] * 2
        with closing(daemon.blocks), daemon.running(), Client(daemon.home) as client:
            found = client.prefill(honest.model, prompt_of(honest), shared=honest.tokens)
        assert cache_bytes(found.cache) == expected, what
        assert found.report.hit_tokens < honest.tokens, what
        assert len(daemon.asked) == 2, what  # what rotted is fetched again, once


def test_a_segment_in_anothers_place_is_not_taken(tmp_path: Path, honest: Subject, sealed: Sealed, expected: bytes) -> None:
    """The right bytes of the wrong segment, under the other's CID: a node and all of its blocks."""
    first, second = sealed[0].manifest.segments[:2]
    blocks = {**sealed[1], first: sealed[1][second], second: sealed[1][first]}
    daemon = ScriptedDaemon(tmp_path / "home")
    daemon.hold(blocks)
    daemon.scripts += [[matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]] * 2
    with closing(daemon.blocks), daemon.running(), Client(daemon.home) as client:
        found = client.prefill(honest.model, prompt_of(honest), shared=honest.tokens)
    assert found.report.hit_tokens == 0
    assert "[integrity.hash]" in (found.report.miss or "")
    assert cache_bytes(found.cache) == expected
