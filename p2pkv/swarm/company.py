"""What a fetch that takes long does beside fetching: it lets others find it, and looks for more providers."""

from __future__ import annotations

from typing import Final

import trio

from p2pkv.artifact.read import Artifact
from p2pkv.swarm.context import Context
from p2pkv.swarm.pool import ProviderPool

# With so few providers more are looked for at once, when the first blocks are under way.
_FEW_PROVIDERS: Final = 2
_AT_ONCE_S: Final = 0.05
# A fetch that is over sooner neither needs more company nor is worth an announcement; the pauses double from here.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 16.0
# So many providers are looked for. Those who come to us are met up to twice that: whoever was not announced, or too late to
# be found, has a way into the swarm only by them. Beyond it each adds messages rather than speed.
_ENOUGH_FOUND: Final = 8
ENOUGH_PROVIDERS: Final = 2 * _ENOUGH_FOUND


async def seek_company(
    context: Context, pool: ProviderPool, artifact: Artifact, scope: trio.CancelScope, *, share: bool
) -> None:
    """Look for more providers of ``artifact``, again and again, until ``scope`` is cancelled; ``share`` it where said so."""
    pause = _FIRST_PAUSE_S
    with scope:
        await _pause(context, _AT_ONCE_S)
        if len(pool.providers) <= _FEW_PROVIDERS:
            _look_for_more(pool, artifact)
        await _pause(context, pause)
        if share:
            context.share(artifact)
        while True:
            _look_for_more(pool, artifact)
            await _pause(context, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _look_for_more(pool: ProviderPool, artifact: Artifact) -> None:
    if len(pool.providers) < _ENOUGH_FOUND and not pool.searching:
        pool.search([artifact.cid.multihash], hopeful=1, enough=_ENOUGH_FOUND)


async def _pause(context: Context, seconds: float) -> None:
    # Spread, so that consumers who started together do not look up and announce together.
    await trio.sleep(seconds * context.rng.uniform(0.75, 1.25))
