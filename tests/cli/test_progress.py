"""Progress: what a moment says, the lines of a pipe, the bars of a terminal, the rate."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from p2pkv.cli.output import Output
from p2pkv.cli.progress import FetchView, Moment, Rate, open_progress
from tests.cli.daemon import progress


class _Lines(io.StringIO):
    """A stream that is no terminal, or one; ``written`` is set by each write."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_moment_reads_as_a_sentence() -> None:
    assert str(Moment("loading")) == "loading"
    assert str(Moment("computing", 256, 1024, "256 of 1,024 tokens")) == "computing: 25 %, 256 of 1,024 tokens"
    assert str(Moment("looking up", figures="2 peers")) == "looking up: 2 peers"


def test_a_fetch_says_what_it_waits_for_and_from_whom() -> None:
    seen: list[Moment] = []
    times = iter([0.0, 2.0])
    view = FetchView(seen.append, clock=lambda: next(times))
    view({"event": "segment", "index": 0, "blocks": {}})
    view(progress(0, 4096, "2 found, 1 reachable", "looking up providers"))
    view(progress(2048, 4096))
    assert str(seen[1]) == (
        "transferring blocks (waiting for 3 blocks of 1 peers): 50 %, 2.0 KiB of 4.0 KiB, 1.0 KiB/s from 1 peer"
    )
    assert seen[0].text == "looking up providers (2 found, 1 reachable)"
    assert list(seen[1].details) == ["12D3KooWOther     2.0 KiB  976.6 KiB/s, 3 blocks asked"]


def test_rate_is_that_of_the_last_seconds() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate(0) == 0.0
    values: list[float] = []
    for second in range(1, 11):
        now = float(second)
        values.append(rate(second * 100 if second <= 5 else 500))
    assert values[:5] == [100.0] * 5
    assert values[-1] == 0.0, "a stall shows within the window"


def test_a_pipe_gets_the_first_moment_at_once_then_the_latest_in_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    with open_progress(Output(False), interval_s=3600) as show:
        show(Moment("first"))
        assert stream.written.wait(5)
        for number in range(100):
            show(Moment("later", number, 100))
        assert stream.getvalue() == "first\n"
    assert stream.getvalue() == "first\nlater: 99 %\n"


def test_what_a_stalled_transfer_waits_for_is_said_without_a_further_event(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    with open_progress(Output(False), interval_s=0.05) as show:
        show(Moment("first"))
        assert stream.written.wait(5)
        stream.written.clear()
        show(Moment("waiting for peer x"))
        assert stream.written.wait(5)
        assert "waiting for peer x" in stream.getvalue()


def test_nothing_is_printed_with_json_or_without_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    with open_progress(Output(True)) as show:
        show(Moment("x"))
    with open_progress(Output(False)):
        pass
    assert stream.getvalue() == ""


def test_a_terminal_gets_bars_that_are_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Lines(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with open_progress(Output(False)) as show:
        show(Moment("computing [bold]\x1b", 1, 2, "1 of 2", ["peer x"]))
    shown = stream.getvalue()
    assert "computing [bold]\ufffd" in shown
    assert "1 of 2" in shown
    assert "peer x" in shown
    assert shown.endswith("\x1b[2K")
