"""The node's log as JSON: one object a line, whatever is logged, and whatever ends the node."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bench.processes import node_process
from p2pkv.errors import NotFoundError, P2pkvError
from p2pkv.store.home import HomeLayout
from p2pkv.store.secrets import read_node_key
from p2pkv_node.logs import JsonFormatter

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
FIELDS = {"time", "level", "logger", "message", "code", "advice", "traceback"}
ANYBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def line(message: str, *arguments: object, error: BaseException | None = None) -> dict[str, Any]:
    caught = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("p2pkv.test", logging.WARNING, __file__, 1, message, arguments, caught)
    record.created, record.msecs = 1_767_225_600.0, 7.9
    text = JsonFormatter().format(record)
    assert text.isprintable()
    assert text.isascii()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_record_is_an_object_with_the_time_in_utc() -> None:
    assert line("%d blocks", 3) == {
        "time": "2026-01-01T00:00:00.007Z",
        "level": "warning",
        "logger": "p2pkv.test",
        "message": "3 blocks",
    }


def test_an_error_of_the_tree_has_its_code_and_advice_in_fields_of_their_own() -> None:
    error = NotFoundError("nobody has it", advice="Ask around.")
    expected = {"code": "artifact.not_found", "advice": "Ask around."}
    found = line("bafy: %s", error)
    assert found["message"] == "bafy: nobody has it"
    assert {name: found[name] for name in expected} == expected
    assert "traceback" not in found
    caught = line("it failed", error=error)
    assert {name: caught[name] for name in expected} == expected
    assert caught["message"] == "it failed"
    assert "NotFoundError" in caught["traceback"]
    by_itself = line("refused %s: %s [%s]", "12D3", error.message, error.code)
    assert (by_itself["code"], "advice" in by_itself) == ("artifact.not_found", False)
    assert "code" not in line("refused %s", "some.thing")


@given(text=st.text() | st.text(alphabet='\n\r\x1b\u2028\udcff"\\{}'))
def test_no_text_ends_the_line_or_steers_a_terminal(text: str) -> None:
    assert line("%s", text)["message"] == text
    assert line("of %s", P2pkvError(text))["message"] == f"of {text}"


# --- the process -------------------------------------------------------------------------------------------------------


def entries(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for entry in found:
        assert {"time", "level", "logger", "message"} <= set(entry) <= FIELDS, entry
        assert TIME.fullmatch(entry["time"])
        assert entry["level"] in ("debug", "info", "warning", "error", "critical")
    return found


@pytest.mark.slow
def test_the_log_of_a_node_is_objects_from_its_first_line_to_its_last_without_a_secret(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text('log_format = "json"\nlog_level = "debug"\n')
    with node_process(home, bootstrap=[ANYBODY]) as node:
        node.process.send_signal(signal.SIGTERM)
        node.process.wait(20)
    text = (home / "node.log").read_text()
    found = entries(text)
    (bootstrap,) = (entry for entry in found if entry["message"].startswith("bootstrap "))
    assert (bootstrap["level"], bootstrap["logger"]) == ("warning", "p2pkv_node.kad")
    assert bootstrap["code"] == "peer.unreachable"
    assert bootstrap["advice"]
    assert any(entry["message"].startswith("stopping for signal 15") for entry in found)
    assert read_node_key(HomeLayout(home).node_key).hex() not in text.lower()


def run(home: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "p2pkv_node", "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == ""
    return done.returncode, entries(done.stderr)


@pytest.mark.slow
def test_why_a_node_does_not_start_is_an_object_too(tmp_path: Path) -> None:
    with node_process(tmp_path / "home") as node:
        status, found = run(node.home, "--log-format", "json")
        assert status == 4
        assert found[-1]["level"] == "error"
        assert found[-1]["code"] == "home.locked"
        assert f"process {node.process.pid} " in found[-1]["message"]
        assert f"kill {node.process.pid}" in found[-1]["advice"]


DEFECT = """
import sys, threading, warnings
from p2pkv_node.logs import start_logging
start_logging("info", "json")
warnings.warn("mind the gap")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("no such\\nthing")
"""


def test_what_python_says_of_a_defect_is_an_object_too() -> None:
    done = subprocess.run([sys.executable, "-c", DEFECT], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    warning, of_thread, last = entries(done.stderr)
    assert (warning["logger"], "mind the gap" in warning["message"]) == ("py.warnings", True)
    assert (of_thread["level"], "ZeroDivisionError" in of_thread["traceback"]) == ("critical", True)
    assert (last["level"], "KeyError" in last["traceback"]) == ("critical", True)


@pytest.mark.slow
def test_text_is_for_people(tmp_path: Path) -> None:
    with node_process(tmp_path / "home", bootstrap=[ANYBODY], options=["--log-format", "text"]) as node:
        pass
    first = (node.home / "node.log").read_text().splitlines()[0]
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING p2pkv_node\.kad: bootstrap /ip4/", first)
