"""An index by itself, for tests that need no store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from p2pkv.store.database import Database
from p2pkv.store.index import ArtifactIndex


@contextmanager
def open_index(path: Path, clock: Callable[[], float] = time.time) -> Iterator[ArtifactIndex]:
    with closing(Database(path)) as database:
        yield ArtifactIndex(database, clock=clock)
