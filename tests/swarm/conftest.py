"""A town of simulated nodes in virtual time, and the document that most tests fetch there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from trio.testing import MockClock

from sims.network import open_world
from tests.support.artifacts import Sample, make_sample
from tests.support.sim_town import TOKENS, Town


@pytest.fixture
async def town(autojump_clock: MockClock) -> AsyncIterator[Town]:
    async with open_world() as world:
        yield Town(world)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(TOKENS)
