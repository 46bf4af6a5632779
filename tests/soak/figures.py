"""What a node has at one moment, and whether that stays the same: the verdict of a soak."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.processes import NodeProcess
from p2pkv.store.home import HomeLayout
from p2pkv.units import KIB, MIB

# A figure may grow by this share from the second quarter to the last, and by so much of its own unit: what is cached by peer
# or key, and chance. SQLite's log grows to 4 MiB before it is written into the index, and is then used from its start again.
GROWTH_SHARE: Final = 0.05
ALLOWANCES: Final[Mapping[str, float]] = {
    "rss_mib": 6.0,
    "children_rss_mib": 4.0,
    "open_files": 8.0,
    "threads": 4.0,
    "tasks": 12.0,
    "index_mib": 1.0,
    "wal_mib": 5.0,
    "packs_mib": 8.0,
}
_DISK_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at a node. ``seconds`` since the load began; processes and files of the node's children are counted with it.

    ``rss_mib`` is the daemon's own memory in use, ``packs_mib`` what its packs take on the disk.
    """

    seconds: float
    rss_mib: float
    children_rss_mib: float
    open_files: float
    threads: float
    tasks: float
    index_mib: float
    wal_mib: float
    packs_mib: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians of one figure of one node in the second and in the last quarter, and the most that the latter may be."""

    node: str
    figure: str
    second_quarter: float
    last_quarter: float
    bound: float

    @property
    def flat(self) -> bool:
        return self.last_quarter <= self.bound

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "flat": self.flat}


def look_at(node: NodeProcess, seconds: float) -> Figures:
    """Return the figures of a node that has a status page."""
    pids = [node.process.pid, *_children(node.process.pid)]
    memory = [_status_of(pid, "VmRSS") / KIB for pid in pids]
    layout = HomeLayout(node.home)
    return Figures(
        seconds=seconds,
        rss_mib=memory[0],
        children_rss_mib=sum(memory[1:]),
        open_files=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        threads=sum(_status_of(pid, "Threads") for pid in pids),
        tasks=metric(node, "p2pkv_tasks"),
        index_mib=_size(layout.index) / MIB,
        wal_mib=_size(layout.index.with_name(f"{layout.index.name}-wal")) / MIB,
        packs_mib=sum(_allocated(layout.blocks)) / MIB,
    )


def verdicts(node: str, samples: Sequence[Figures]) -> list[Verdict]:
    """Judge each figure of ``samples``, taken at equal distances in time: at least four."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    found: list[Verdict] = []
    for figure, allowance in ALLOWANCES.items():
        before, after = (median(getattr(sample, figure) for sample in some) for some in (second, last))
        found.append(Verdict(node, figure, before, after, before * (1 + GROWTH_SHARE) + allowance))
    return found


def metric(node: NodeProcess, name: str) -> float:
    """Return a metric without labels."""
    text = httpx.get(f"{node.web}/metrics", timeout=30).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == name)


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found


def _status_of(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _allocated(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # collected meanwhile
            yield path.stat().st_blocks * _DISK_BLOCK_BYTES
