"""Runs the command `p2pkv-node` inside the test's own process, for what ends before a node would start."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from p2pkv_node.main import app


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    status: int
    stdout: str
    stderr: str


def node_command(*arguments: object) -> Done:
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments], prog_name="p2pkv-node")
    status = ended.value.code
    return Done(status if isinstance(status, int) else 0, stdout.getvalue(), stderr.getvalue())
