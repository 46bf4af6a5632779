"""Checks of the machine: its clock, and how many files a process may have open. They ask the system alone, and no network."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from p2pkv.client.doctor.finding import Finding, State
from p2pkv.limits import EARLIEST_TIME_S, MAX_CLOCK_SKEW_S, MIN_OPEN_FILES
from p2pkv.units import MINUTE, format_seconds

# adjtimex(2): more than `struct timex` of any platform takes, with no mode set, so that nothing is adjusted.
_TIMEX_BYTES: Final = 512
_TIME_ERROR: Final = 5


def check_clock(now: float, newest: int | None, synchronised: bool | None, signed: Sequence[int] = ()) -> Finding:
    """``now`` and ``newest``, of what was stored last: seconds since the epoch; ``synchronised``: as the system says.

    ``signed`` are the times at which publishers, each once, say that they signed their last statement known here. One of them
    may be wrong; where two are ahead of this clock, this clock is behind.
    """
    name = "clock"
    shown = moment(now)
    advice = "Set the clock, for example with `timedatectl set-ntp true`."
    if now < EARLIEST_TIME_S:
        return Finding(name, State.PROBLEM, f"{shown} is before this version was made", advice)
    if newest is not None and now < newest - MAX_CLOCK_SKEW_S:
        found = f"{shown}, but an artifact was stored here at {moment(newest)}: the clock went back, or was wrong then"
        return Finding(name, State.PROBLEM, found, advice)
    ahead = [when - now for when in signed if when > now + MAX_CLOCK_SKEW_S]
    if len(ahead) > 1:
        found = (
            f"{shown}, but {len(ahead)} publishers signed something {format_seconds(min(ahead))} later, or more: it is behind"
        )
        return Finding(name, State.PROBLEM, found, advice)
    if synchronised:
        return Finding(name, State.OK, f"{shown}, synchronised as the system says; the peers' clocks are not known")
    return Finding(
        name,
        State.UNKNOWN,
        f"{shown}; " + ("the system does not say whether it is right" if synchronised is None else "nothing synchronises it"),
        f"Compare `date -u` with a clock that is right: above {MAX_CLOCK_SKEW_S // MINUTE} minutes artifacts are refused. "
        "`timedatectl set-ntp true` keeps it right.",
    )


def clock_is_synchronised() -> bool | None:
    """Return whether the kernel's clock is kept by NTP or the like, ``None`` where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else bool(state != _TIME_ERROR)


def check_open_files(limit: int | None, *, of_node: bool) -> Finding:
    """``limit`` is that of the node, or of a node that would be started from here; ``None`` for no limit."""
    name = "open files"
    whose = "the node" if of_node else "a node that is started from here"
    if limit is None:
        return Finding(name, State.OK, f"no limit for {whose}")
    found = f"{whose} may have {limit:,} open"
    if limit < MIN_OPEN_FILES:
        return Finding(
            name,
            State.WARNING,
            f"{found}; a busy one needs {MIN_OPEN_FILES:,}",
            "Run `ulimit -n 65536` before `p2pkv-node`, or set LimitNOFILE in its unit.",
        )
    return Finding(name, State.OK, found)


def open_files_limit() -> int | None:
    """Return how many files this process may have open, ``None`` for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S UTC}"
