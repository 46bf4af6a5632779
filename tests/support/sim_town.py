"""Simulated nodes around one small document, for tests of a fetch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import trio

from p2pkv.formats.tensors import Dtype
from p2pkv.ports import PeerAddress, Routing
from p2pkv.swarm.target import PromptTarget
from sims.network import World
from sims.node import SimNode
from sims.routing import ProviderRecords
from tests.support.artifacts import Sample, model

TOKENS = list(range(1000, 1000 + 600))
PROMPT = [*TOKENS, 1, 2, 3]


class Town:
    """A world with helpers to put nodes into it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.records = ProviderRecords()

    def node(self, name: str, **options: object) -> SimNode:
        return SimNode(self.world, self.records, name, **options)  # type: ignore[arg-type]  # tests pass SimNode's own options

    async def provider(self, name: str, sample: Sample, *, without: int = 0, **options: object) -> SimNode:
        """A node that holds ``sample``, except its last ``without`` blocks, and has announced it."""
        node = self.node(name, **options)
        node.hold(sample.artifact, dict(list(sample.blocks.items())[: len(sample.blocks) - without]))
        await node.announce(sample.artifact)
        return node


class WatchedRouting:
    """A node's routing that notes which keys are looked up, and how many seconds after the start."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._started = trio.current_time()
        self.looked_up: dict[bytes, list[float]] = {}

    async def announce(self, key: bytes) -> bool:
        return await self._routing.announce(key)

    def withdraw(self, key: bytes) -> None:
        self._routing.withdraw(key)

    def find_providers(self, key: bytes) -> AbstractAsyncContextManager[AsyncIterator[PeerAddress]]:
        self.looked_up.setdefault(key, []).append(trio.current_time() - self._started)
        return self._routing.find_providers(key)


def prompt(token_ids: list[int] = PROMPT, *, shared: int | None = None, dtype: Dtype = Dtype.BF16) -> PromptTarget:
    return PromptTarget(model().model_id, dtype, tuple(token_ids), shared)
