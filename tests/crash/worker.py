"""``python -m tests.crash.worker HOME SEED``: publishes, fetches, pins and collects without end, until it is killed.

Says on stdout what it may be held to, a line each: ``imported`` before the home is touched, then ``pinned N`` behind each pin
of sample N, and ``unpinning N`` before one is taken away.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from p2pkv.errors import NotFoundError
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample, make_sample

PACK_BYTES = 40_000
TOKENS = list(range(600))
SAMPLES = [
    make_sample(TOKENS),
    make_sample([*TOKENS[:512], *range(100, 300)]),  # shares two segments with the first
    *(make_sample([number * 1_000 + token for token in range(200 + 100 * number)], seed=number) for number in range(1, 7)),
]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def publish(store: Store, sample: Sample) -> None:
    """As a publisher and its daemon do."""
    with open_staging(store.layout.home) as staging:
        for cid, data in sample.blocks.items():
            staging.write(cid, data)
        store.publish(staging.name, sample.cid)


def fetch(store: Store, sample: Sample, rng: random.Random) -> None:
    """As a fetch does, which may end early: what is here is not fetched again."""
    lease = store.lease(sample.cid, 60)
    for cid, data in sample.blocks.items():
        if rng.random() < 0.01:
            return
        try:
            store.read(cid)
        except NotFoundError:
            store.write(cid, data)
    store.add_artifact(sample.artifact, frozenset(range(len(sample.artifact.chain_keys))))
    store.renew(lease, 1)


def work(store: Store, rng: random.Random) -> None:
    number = rng.randrange(len(SAMPLES))
    sample = SAMPLES[number]
    match rng.randrange(6):
        case 0:
            publish(store, sample)
        case 1 | 2:
            fetch(store, sample, rng)
        case 3 if store.index.artifact(sample.cid) is not None:
            store.holds.pin("crash", sample.cid)
            say(f"pinned {number}")
        case 4 if rng.random() < 0.3:
            say(f"unpinning {number}")
            store.holds.unpin("crash", sample.cid)
        case _:
            store.collector.collect()


def main() -> None:
    home, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    say("imported")
    quota = rng.choice([0, 50_000, 200_000])
    with open_store(home, quota=quota) as store:
        store.blocks._max_pack_bytes = PACK_BYTES
        while True:
            work(store, rng)


if __name__ == "__main__":
    main()
