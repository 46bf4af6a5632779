"""The command line run in this process, each test with a home of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2pkv.cli.app import main
from tests.cli.daemon import FakeDaemon


@dataclass(frozen=True)
class Ran:
    """What one command left behind."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error of the one JSON object on stderr."""
        (name, found), *rest = json.loads(self.err).items()
        assert name == "error"
        assert not rest
        assert isinstance(found, dict)
        return found


Cli = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default home of the test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("P2PKV_HOME", str(folder))
    monkeypatch.delenv("P2PKV_DEBUG", raising=False)
    return folder


@pytest.fixture
def cli(home: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs ``p2pkv`` with its arguments."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Ran(end.value.code, out, err)

    return run


@pytest.fixture
def daemon(home: Path) -> Iterator[FakeDaemon]:
    """A control API with scripted answers on the test's home."""
    with FakeDaemon(home).running() as fake:
        yield fake
