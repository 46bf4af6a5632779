"""The command line as a whole: help, versions, usage errors, exit statuses, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pkv import __version__
from p2pkv.cli import status
from p2pkv.cli.output import fields, printable
from p2pkv.errors import EXIT_STATUS, P2pkvError, error_classes
from p2pkv.units import plural
from tests.cli.conftest import Cli
from tests.cli.daemon import FakeDaemon
from tests.support.commands import commands


def test_help_names_every_command_and_the_exit_statuses(cli: Cli) -> None:
    shown = cli("--help")
    assert shown.status == 0
    for command in commands():
        assert f"\n  {command.split()[0]} " in shown.out
    assert "Exit status: 0 done, 2 " in shown.out


@pytest.mark.parametrize("command", commands())
def test_each_command_teaches_with_an_example(cli: Cli, command: str) -> None:
    shown = cli(*command.split(), "--help")
    assert shown.status == 0
    assert f"\n    p2pkv {command}" in shown.out.partition("Example:")[2]
    assert ("--home" in shown.out) is (command not in ("build", "join"))  # which look at the files alone that they are given
    assert "--json" in shown.out


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"p2pkv {__version__}\n"


@pytest.mark.parametrize("group", [[], ["trust"]])
def test_without_a_command_the_help_is_shown(cli: Cli, group: list[str]) -> None:
    shown = cli(*group)
    assert (shown.status, shown.out) == (2, "")
    assert "Commands:" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["fetch"], ["fetch", "a", "b"], ["fetch", "x", "--patience", "0"], ["publish", "m", "t", "--dtype", "int8"]],
)
def test_usage_errors_have_two_lines_or_one_object(cli: Cli, arguments: list[str]) -> None:
    told = cli(*arguments)
    assert (told.status, told.out) == (2, "")
    first, second = told.err.splitlines()
    assert first.startswith("p2pkv: ")
    assert first.endswith("[usage]")
    assert second.startswith("       Try `p2pkv ")
    assert cli(*arguments, "--json").error["code"] == "usage"


@pytest.mark.parametrize("code", sorted(error_classes()))
def test_each_error_of_the_daemon_keeps_its_code_and_status(cli: Cli, daemon: FakeDaemon, code: str) -> None:
    error = error_classes()[code]("it happened", advice="Do that.")
    daemon.answers["GET", "/v1/status"] = 503, {"error": error.to_dict()}
    told = cli("status")
    assert told.status == EXIT_STATUS[error.fault]
    assert told.err == f"p2pkv: it happened [{code}]\n       Do that.\n"
    told = cli("status", "--json")
    assert (told.status, told.error) == (EXIT_STATUS[error.fault], error.to_dict())


def test_a_defect_is_named_one_and_shows_its_traceback_only_when_asked(
    cli: Cli, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(document: object) -> list[tuple[str, str]]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(status, "_pairs", broken)
    told = cli("status")
    assert told.status == 1
    assert told.err.startswith("p2pkv: ZeroDivisionError: oops [internal]\n")
    assert "Traceback" not in told.err
    monkeypatch.setenv("P2PKV_DEBUG", "1")
    assert "Traceback" in cli("status").err


def test_a_reader_that_leaves_is_no_error(home: Path, daemon: FakeDaemon) -> None:
    command = [sys.executable, "-m", "p2pkv.cli.app", "status", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=30, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, p2pkv.cli.app; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert not {"torch", "transformers", "numpy", "httpx", "trio", "libp2p", "tokenizers"} & set(done.stdout.split())


def test_strangers_texts_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31mb\u202ec\nd") == "a\ufffd[31mb\ufffdc\ufffdd"
    assert printable("Größe 東京") == "Größe 東京"


def test_shapes_of_lines() -> None:
    assert fields([("a", "1"), ("long", "2"), ("", "3")]) == ["a     1", "long  2", "      3"]
    assert [plural(1, "peer"), plural(3774, "token")] == ["1 peer", "3,774 tokens"]
    assert P2pkvError("x").exit_status == 2
