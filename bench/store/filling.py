"""``python -m bench.store.filling HOME BLOCKS``: fill a home as a daemon that fetches does, and wait to be killed.

Says ``filled`` when at least BLOCKS blocks lie there. They are so small that one pack holds them all: after a kill every one
of them has to be found again, which no home with blocks of a real size comes near to.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Final

from bench.artifacts import SMOLLM2, Shape, build, random_segments
from p2pkv.artifact.read import open_artifact
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.limits import SEGMENT_TOKENS
from p2pkv.store.store import Store, open_store

_TINY: Final = Shape("tiny", SMOLLM2.layers, LayerGeometry(LayerKind.FULL, kv_heads=1, k_dim=1, v_dim=1))
_SEGMENTS: Final = 8  # of each artifact: 2,048 tokens


def fill(store: Store, wanted: int) -> None:
    """Store and list whole artifacts until there are ``wanted`` blocks."""
    for number in count():
        if store.statistics().blocks >= wanted:
            break
        segments = random_segments(_TINY, _SEGMENTS, seed=number)
        built = build(_TINY, segments, store.write, first_token=number * _SEGMENTS * SEGMENT_TOKENS)
        store.index.add_artifact(open_artifact(built.manifest, built.envelope), range(_SEGMENTS))


def main() -> None:
    home, wanted = sys.argv[1:]
    with open_store(Path(home)) as store:
        fill(store, int(wanted))
        sys.stdout.write("filled\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
