"""At which lengths of a text its artifact is announced and looked up (design, section 3; ``docs/spec/keys.md``).

An artifact of n segments is announced at 1, 2, 4, 8, ... and n segments, at its tail, and by manifest CID: O(log n) records.
A prompt that goes on where the artifact ends, or that leaves it somewhere, still shares the largest power of two below that
place, and the providers found there are asked for their longest match.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.formats.cid import Cid
from p2pkv.keys import Chain, dht_key
from p2pkv.limits import SEGMENT_TOKENS


def boundaries(segments: int) -> list[int]:
    """Return the lengths in segments to announce or look up, longest first: n and every power of two below it."""
    lengths = {segments} if segments else set()
    power = 1
    while power < segments:
        lengths.add(power)
        power *= 2
    return sorted(lengths, reverse=True)


def announce_keys(manifest: Cid, token_count: int, chain_keys: Sequence[bytes]) -> list[bytes]:
    """Return the DHT keys of an artifact, the most useful first. ``chain_keys`` are those after each segment.

    A private artifact has no chain keys here, and is announced by manifest CID alone: only readers look for it.
    """
    if not all(chain_keys):
        return [manifest.multihash]
    whole = token_count // SEGMENT_TOKENS
    keys = [dht_key(chain_keys[length - 1]) for length in boundaries(whole)]
    if len(chain_keys) > whole:
        keys.insert(0, dht_key(chain_keys[-1]))
    return [manifest.multihash, *keys]


def lookup_keys(chain: Chain, shared: Chain | None) -> list[bytes]:
    """Return the DHT keys to look up for a prompt; ``shared`` is the chain of its known shared part.

    The end of the shared part comes first, where the artifact that is hoped for ends, then the prompt from its end down.
    """
    ends = [c.last for c in (shared, chain) if c is not None and c.token_count]
    steps = [chain.keys[length] for length in boundaries(chain.segments)]
    return [dht_key(key) for key in dict.fromkeys([*ends, *steps])]


def query_keys(chain: Chain, shared: Chain | None) -> list[bytes]:
    """Return the chain keys to ask a provider for, shortest first: each whole segment's, then the tails."""
    tails = [c.tail for c in (shared, chain) if c is not None and c.tail is not None]
    return [*chain.keys[1:], *dict.fromkeys(tails)]
