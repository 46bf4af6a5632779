"""What is measured: each case by name, and how it is opened."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, TypeAlias

from bench.artifacts import LLAMA, SMOLLM2, Shape
from bench.transfer import nodes, rivals
from bench.transfer.measure import Measurement
from p2pkv.errors import P2pkvError
from p2pkv.units import MIB

# What a case may fail with: a process that does not come up or falls silent, wrong bytes, a refusal of our own.
FAILURES: Final = (RuntimeError, OSError, P2pkvError)

Opened: TypeAlias = AbstractContextManager[Callable[[], Measurement]]


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share."""

    folder: Path
    data_bytes: int
    isolated: bool

    @cached_property
    def data(self) -> Path:
        """A file of ``data_bytes`` random bytes: what other systems transfer."""
        path = self.folder / "data"
        rng = random.Random(1)
        with path.open("wb") as file:
            for _ in range(self.data_bytes // MIB):
                file.write(rng.randbytes(MIB))
        return path


@dataclass(frozen=True, slots=True)
class Case:
    """``open`` runs the seeders and yields what measures one transfer; ``package`` is what has to be installed for it."""

    name: str
    system: str
    open: Callable[[Setting, Path], Opened]
    package: str | None = None
    needs_isolation: bool = False

    def skipped(self, setting: Setting) -> str | None:
        """Return why this case cannot be measured here, ``None`` where it can."""
        if self.package is not None and (reason := rivals.missing(self.package)):
            return reason
        if self.needs_isolation and not setting.isolated:
            return f"{self.system} would look for its public relays, and a network namespace cannot be made here"
        return None


def _nodes(seeders: int, shape: Shape, options: Sequence[str], setting: Setting, folder: Path) -> Opened:
    return nodes.open_nodes(folder, seeders, setting.data_bytes, shape=shape, options=options, isolated=setting.isolated)


def _peers(module: str, seeders: int, setting: Setting, folder: Path) -> Opened:
    return rivals.open_peers(folder, seeders, setting.data, module=module, isolated=setting.isolated)


CASES: Final = (
    Case("p2pkv_1", "p2pkv", partial(_nodes, 1, LLAMA, ())),
    Case("p2pkv_4", "p2pkv", partial(_nodes, 4, LLAMA, ())),
    Case("p2pkv_192k_1", "p2pkv", partial(_nodes, 1, SMOLLM2, ())),
    Case("stream_1", "p2pkv", partial(_nodes, 1, LLAMA, ("--no-bulk",))),
    Case("libtorrent_1", "libtorrent", partial(_peers, "torrent", 1), package="libtorrent"),
    Case("libtorrent_4", "libtorrent", partial(_peers, "torrent", 4), package="libtorrent"),
    Case("iroh_1", "iroh", partial(_peers, "iroh_blobs", 1), package="iroh", needs_isolation=True),
    Case("iroh_4", "iroh", partial(_peers, "iroh_blobs", 4), package="iroh", needs_isolation=True),
    Case("libp2p_1", "libp2p", partial(_peers, "libp2p_stream", 1)),
    Case("tls_limit", "tls", partial(_peers, "tls_stream", 1)),
)
NAMES: Final = tuple(dict.fromkeys(name for case in CASES for name in (case.system, case.name)))


def select(names: Sequence[str]) -> list[Case]:
    """Return the cases with one of ``names`` as their own or their system's; all where there are none."""
    return [case for case in CASES if not names or case.name in names or case.system in names]
