"""Progress on stderr: bars on a terminal, a line a second elsewhere, nothing with ``--json``."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from p2pkv.cli.output import Output, printable
from p2pkv.units import format_bytes, format_rate, plural

_PLAIN_INTERVAL_S: Final = 1.0
# Long enough to smooth the arrival of blocks, short enough to show a stall.
_RATE_WINDOW_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What to show now: what goes on, how far it is (``total`` 0: nobody knows), and lines of detail for a terminal."""

    text: str
    done: int = 0
    total: int = 0
    figures: str = ""
    details: Sequence[str] = ()

    def __str__(self) -> str:
        share = f"{100 * self.done // self.total} %" if self.total else ""
        known = ", ".join(part for part in (share, self.figures) if part)
        return f"{self.text}: {known}" if known else self.text


Show: TypeAlias = Callable[[Moment], None]


@contextmanager
def open_progress(output: Output, *, interval_s: float = _PLAIN_INTERVAL_S) -> Iterator[Show]:
    """Yield a function that shows a moment, in the way that suits where stderr goes."""
    if output.as_json:
        yield lambda moment: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        with _lines(interval_s) as show:
            yield show


@contextmanager
def _bars() -> Iterator[Show]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        auto_refresh=False,
    )
    task = progress.add_task("", total=None, figures="")
    with Live(progress, console=Console(stderr=True), transient=True, refresh_per_second=8) as live:

        def show(moment: Moment) -> None:
            description = printable(moment.text)
            progress.update(
                task, description=description, completed=moment.done, total=moment.total or None, figures=moment.figures
            )
            live.update(Group(progress, *(Text(f"  {printable(line)}", overflow="ellipsis") for line in moment.details)))

        yield show


@contextmanager
def _lines(interval_s: float) -> Iterator[Show]:
    """Print the first moment at once, then the latest one each ``interval_s`` where it is new, and the last at the end.

    A thread prints them, so that what a stalled transfer waits for is said even when no further event comes.
    """
    changed, ended, lock = threading.Event(), threading.Event(), threading.Lock()
    latest: list[str] = []

    def show(moment: Moment) -> None:
        with lock:
            if latest[-1:] != [str(moment)]:
                latest[:] = [str(moment)]
                changed.set()

    def write() -> None:
        while changed.wait() and not ended.is_set():
            flush()
            ended.wait(interval_s)

    def flush() -> None:
        with lock:
            if changed.is_set():
                changed.clear()
                sys.stderr.write(f"{printable(latest[0])}\n")
                sys.stderr.flush()

    thread = threading.Thread(target=write, name="p2pkv-progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        if latest:
            flush()
        changed.set()
        thread.join()


class Rate:
    """Bytes per second over the last few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def __call__(self, total: int) -> float:
        """Take the count so far and return the present rate."""
        now = self._clock()
        self._samples.append((now, total))
        while now - self._samples[0][0] > _RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        start, before = self._samples[0]
        return (total - before) / (now - start) if now > start else 0.0


def show_steps(show: Show) -> Callable[[str, int, int], None]:
    """Return what shows what is being done with a file, and how many of its bytes are done."""

    def hear(step: str, done: int, total: int) -> None:
        show(Moment(step, done, total, f"{format_bytes(done)} of {format_bytes(total)}" if total else ""))

    return hear


class FileView:
    """Turns the daemon's events of a publication, an import or an export into moments; an ``on_event`` of the client."""

    def __init__(self, show: Show) -> None:
        self._hear = show_steps(show)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self._hear(event["state"], event["done_bytes"], event["total_bytes"])


class FetchView:
    """Turns the daemon's events of one fetch into moments; an ``on_event`` of the client."""

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._rate = Rate(clock)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] != "progress":
            return
        peers = [peer for peer in event["peers"] if peer["bytes"] or peer["outstanding"]]
        rate = self._rate(sum(peer["bytes"] for peer in event["peers"]))
        done, total = event["done_bytes"], event["total_bytes"]
        figures = f"{format_bytes(done)} of {format_bytes(total)}, {format_rate(rate)}" if total else ""
        if peers:
            figures += f" from {plural(len(peers), 'peer')}"
        text = event["state"] + (f" ({event['detail']})" if event["detail"] else "")
        self._show(Moment(text, done, total, figures, [_peer_line(peer) for peer in peers]))


def _peer_line(peer: dict[str, Any]) -> str:
    state = "silent" if peer["snubbed"] else f"{format_rate(peer['rate'])}, {plural(peer['outstanding'], 'block')} asked"
    return f"{peer['peer']}  {format_bytes(peer['bytes']):>10}  {state}"
