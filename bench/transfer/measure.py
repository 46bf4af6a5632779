"""What one transfer took: time, CPU, memory and bytes on the wire."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.settle import cpu_seconds
from bench.transfer.netns import loopback_bytes
from p2pkv.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class Measurement:
    """One transfer of ``data_bytes``, verified.

    ``seconds`` run from the call to the last byte, ``first_byte_s`` to the first. CPU seconds are user and system time of
    exactly the transfer. ``rss_growth_bytes`` is how far the receiver's peak memory went beyond its memory before the call,
    less the data where the receiver holds them in its own memory. ``wire_bytes`` went through loopback, in both directions
    and with headers; ``None`` where others use loopback too. ``details`` are for people.
    """

    data_bytes: int
    seconds: float
    first_byte_s: float
    receiver_cpu_s: float
    senders_cpu_s: float
    rss_growth_bytes: int
    wire_bytes: int | None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rate_mib_s(self) -> float:
        return self.data_bytes / MIB / self.seconds

    def to_row(self) -> dict[str, Any]:
        """Return what a row of the JSON says of it."""
        row: dict[str, Any] = {
            "data_mib": self.data_bytes / MIB,
            "mib_s": self.rate_mib_s,
            "seconds": self.seconds,
            "first_byte_s": self.first_byte_s,
            "receiver_cpu_s": self.receiver_cpu_s,
            "senders_cpu_s": self.senders_cpu_s,
            "rss_growth_mib": self.rss_growth_bytes / MIB,
        }
        if self.wire_bytes is not None:
            row["wire_ratio"] = self.wire_bytes / self.data_bytes
        return {**row, "details": dict(self.details)} if self.details else row


@dataclass(frozen=True, slots=True)
class Usage:
    """What :class:`Meter` saw; see :class:`Measurement`."""

    receiver_cpu_s: float
    senders_cpu_s: float
    peak_growth_bytes: int
    wire_bytes: int | None


class Meter:
    """Counts from its making to :meth:`stop`.

    The receiver is the process and its children. With ``calls_here`` it works on behalf of this process, whose CPU time then
    counts as well.
    """

    def __init__(self, receiver: int, senders: Sequence[int], *, isolated: bool, calls_here: bool = False) -> None:
        self._receivers = family(receiver)
        self._senders = senders
        self._isolated = isolated
        self._calls_here = calls_here
        # Resets the high-water mark of the receiver's memory (proc(5), "clear_refs"); it is ours, so we may.
        for pid in self._receivers:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._rss = self._receivers_bytes("VmRSS")
        self._wire = loopback_bytes() if isolated else 0
        self._senders_cpu = sum(map(cpu_seconds, senders))
        self._receiver_cpu = self._receivers_cpu()

    def stop(self) -> Usage:
        receiver_cpu = self._receivers_cpu()
        senders_cpu = sum(map(cpu_seconds, self._senders))
        return Usage(
            receiver_cpu_s=receiver_cpu - self._receiver_cpu,
            senders_cpu_s=senders_cpu - self._senders_cpu,
            peak_growth_bytes=self._receivers_bytes("VmHWM") - self._rss,
            wire_bytes=loopback_bytes() - self._wire if self._isolated else None,
        )

    def _receivers_cpu(self) -> float:
        return sum(map(cpu_seconds, self._receivers)) + (time.process_time() if self._calls_here else 0.0)

    def _receivers_bytes(self, name: str) -> int:
        """Return the memory of them all; what they share counts for each of them."""
        return sum(_status_bytes(pid, name) for pid in self._receivers)


def family(pid: int) -> list[int]:
    """Return ``pid`` and the processes that it has started."""
    children: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.parent.name))
    return [pid, *children]


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/{pid}/status has no {name}")
