"""Commands as processes, also on a terminal of their own."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from pathlib import Path


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "P2PKV_HOME": str(home), "PYTHONWARNINGS": "error"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "p2pkv.cli.app", *map(str, arguments)]


def on_a_terminal(arguments: list[str], home: Path, answers: list[tuple[str, bytes]]) -> tuple[int, str]:
    """Run a command on a terminal of its own; give each answer when its question is shown. Return status and screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(arguments[0], arguments, environment(home))  # noqa: S606  # the project's own command
    screen, waiting, deadline = "", list(answers), time.monotonic() + 50
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                screen += os.read(terminal, 4096).decode()
            except OSError:  # the other end is closed
                break
        if waiting and re.search(waiting[0][0], screen):
            os.write(terminal, waiting.pop(0)[1] + b"\n")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert not waiting, screen
    return os.waitstatus_to_exitcode(status), screen
