"""A town of real nodes, and a tiny model for them to serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from p2pkv import Prefill, PrefillReport
from p2pkv.formats.cid import Cid, Codec
from tests.support.crafted import Pieces, compute
from tests.support.llama import build_model, cache_bytes, local_cache, random_tokens
from tests.support.town import Daemon, Town, open_town

SHARED = 700
Ask = Callable[..., Awaitable[PrefillReport]]


@pytest.fixture(scope="package", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Clients and daemons share the cores: pools of waiting threads would only take them from one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """The tiny model in bf16, with blocks that wait for a bulk lane: of 128 KiB, and 94 KiB in the tail.

    Tests leave it as it is.
    """
    return build_model(torch.bfloat16, num_key_value_heads=4)


@pytest.fixture(scope="session")
def document() -> list[int]:
    """The shared part: two whole segments and a tail."""
    return random_tokens(SHARED)


@pytest.fixture(scope="session")
def prompt(document: list[int]) -> list[int]:
    """The document and a question."""
    return [*document, *random_tokens(9, seed=2)]


@pytest.fixture(scope="session")
def expected(model: LlamaForCausalLM, prompt: list[int]) -> bytes:
    """Keys and values of the prompt's cache, computed here."""
    return cache_bytes(local_cache(model, prompt, SHARED))


@pytest.fixture(scope="session")
def pieces(model: LlamaForCausalLM, document: list[int]) -> Pieces:
    """The document's artifact, unsigned: 12 blocks of 128 KiB and less, 3 nodes."""
    return compute(model, document)


@pytest.fixture
def ask(model: LlamaForCausalLM, prompt: list[int], expected: bytes) -> Ask:
    """Return a function that lets a daemon prefill, asserts that the answer is right, and returns the report."""

    async def call(consumer: Daemon, **options: Any) -> PrefillReport:
        prefill: Prefill = await consumer.client.prefill(model, prompt, shared=SHARED, **options)
        assert cache_bytes(prefill.cache) == expected
        return prefill.report

    return call


async def provide(town: Town, name: str, pieces: Pieces, **options: Any) -> Daemon:
    provider = await town.start(name, **options)
    await provider.plant(*pieces.signed())
    return provider


def is_block(cid: Cid) -> bool:
    return cid.codec is Codec.RAW
