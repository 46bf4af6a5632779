"""``status`` and ``fetch`` against a scripted control API."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pkv.errors import EXIT_STATUS, error_classes
from p2pkv.store.home import HomeLayout
from tests.cli.conftest import Cli
from tests.cli.daemon import STATUS, FakeDaemon, progress, report
from tests.support.artifacts import make_sample

CID = str(make_sample([1, 2, 3]).cid)


def test_status_reads_like_a_page_and_like_json(cli: Cli, daemon: FakeDaemon) -> None:
    row = {"manifest_cid": CID, "model_name": "tiny", "dtype": "bf16", "token_count": 300, "complete": False}
    daemon.answers["GET", "/v1/artifacts"] = 200, {"artifacts": [row] * 12}
    shown = cli("status")
    assert (shown.status, shown.err) == (0, "")
    values = {line[:9].strip(): line[9:].strip() for line in shown.out.splitlines() if line[:9].strip()}
    assert values["node"] == "12D3KooWTest, p2pkv 0.1.0, up 2 min 05 s"
    assert values["store"] == "420 blocks, 82.9 MiB"
    assert values["announced"] == "9 of 12 keys, on time"
    assert "banned" not in values
    assert shown.out.count(f"{CID}  tiny, bf16, 300 tokens, incomplete") == 10
    assert "and 2 more" in shown.out
    assert cli("status", "--json").document == {**STATUS, "artifacts": [row] * 12}


def test_status_tells_what_is_wrong(cli: Cli, daemon: FakeDaemon) -> None:
    wrong = {
        "announcing": {"keys": 2, "announced": 0, "late_s": 3700.0},
        "banned_peers": ["x"],
        "store": STATUS["store"] | {"damaged_blocks": 2},
    }
    daemon.answers["GET", "/v1/status"] = 200, STATUS | wrong
    shown = cli("status").out
    assert "61 min 40 s late" in shown
    assert "1 peer for sending wrong blocks" in shown
    assert "2 blocks found and removed" in shown


@pytest.mark.parametrize("arguments", [["status"], ["fetch", CID]])
def test_without_a_daemon_the_answer_says_how_to_start_one(cli: Cli, arguments: list[str]) -> None:
    told = cli(*arguments)
    assert (told.status, told.out) == (4, "")
    assert "[daemon.unreachable]" in told.err
    assert "p2pkv-node" in told.err.splitlines()[1]


# httpcore leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_socket_of_a_dead_daemon_is_no_daemon(cli: Cli, home: Path) -> None:
    home.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(HomeLayout(home).secure_control_socket()))
    told = cli("status", "--json")
    assert (told.status, told.error["code"]) == (4, "daemon.unreachable")


def test_fetch_prints_progress_on_stderr_and_the_result_on_stdout(cli: Cli, daemon: FakeDaemon) -> None:
    daemon.events = [progress(0, 12_288), progress(12_288, 12_288, "", "done"), report(CID, blocks_refused=1, peers_lost=2)]
    ran = cli("fetch", CID, "--patience", "7")
    assert ran.status == 0
    assert ran.out.splitlines() == [
        f"fetched {CID}",
        "300 tokens, 12.0 KiB from 2 peers in 1.50 s, 0 B were here already",
        "  12D3KooWThird     8.0 KiB     1.9 MiB/s",
        "  12D3KooWOther     4.0 KiB   976.6 KiB/s",
        "1 block refused on the way",
        "2 peers lost on the way",
    ]
    assert "done: 100 %, 12.0 KiB of 12.0 KiB" in ran.err.splitlines()[-1]
    assert daemon.requests == [("POST", "/v1/fetch", {"manifest": CID, "patience_s": 7.0})]


def test_a_slice_is_asked_for_and_told(cli: Cli, daemon: FakeDaemon) -> None:
    daemon.events = [report(CID, segments=1, hit_tokens=256, layers=[4, 8], complete=False)]
    ran = cli("fetch", CID, "--segments", 1, "--layers", "4:8")
    assert ran.status == 0
    assert ran.out.splitlines()[1] == "1 segment in layers 4:8, of 300 tokens in all"
    assert daemon.requests == [
        ("POST", "/v1/fetch", {"manifest": CID, "patience_s": 600.0, "segments": 1, "layers": [4, 8]}),
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--segments", "0"),
        ("--segments", "x"),
        *(("--layers", text) for text in ("4", "8:4", "4:4", "a:b", "-1:2", "0:99999")),
    ],
)
def test_what_is_no_slice_is_refused_before_the_daemon_is_asked(cli: Cli, daemon: FakeDaemon, option: str, value: str) -> None:
    told = cli("fetch", CID, f"{option}={value}", "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
    assert option.strip("-") in told.error["message"]
    assert daemon.requests == []


def test_fetch_with_json_prints_one_object_and_no_progress(cli: Cli, daemon: FakeDaemon) -> None:
    daemon.events = [progress(0, 10), report(CID)]
    ran = cli("fetch", CID, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.document == {name: value for name, value in report(CID).items() if name != "event"}


@pytest.mark.parametrize(
    "code", ["artifact.not_found", "fetch.incomplete", "trust.untrusted", "integrity.signature", "store.full"]
)
def test_a_fetch_that_fails_exits_by_its_class(cli: Cli, daemon: FakeDaemon, code: str) -> None:
    error = error_classes()[code]("it happened")
    daemon.events = [progress(1, 10), {"event": "error", **error.to_dict()}]
    told = cli("fetch", CID, "--json")
    assert (told.status, told.error) == (EXIT_STATUS[error.fault], error.to_dict())
    assert cli("fetch", CID).err.endswith(f"p2pkv: it happened [{code}]\n       {error.advice}\n")


def test_a_daemon_that_dies_during_a_fetch_is_told(cli: Cli, daemon: FakeDaemon) -> None:
    daemon.events = [progress(1, 10)]
    told = cli("fetch", CID, "--json")
    assert (told.status, told.error["code"]) == (4, "daemon.unreachable")
    assert "resume" in told.error["advice"]


def test_what_is_no_cid_is_refused_before_the_daemon_is_asked(cli: Cli, daemon: FakeDaemon) -> None:
    told = cli("fetch", CID[:-1], "--json")
    assert (told.status, told.error["code"]) == (3, "format.cid")
    assert daemon.requests == []


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------


def _interrupt(command: list[str], ready: bytes, folder: Path | None = None) -> tuple[int, float, bytes]:
    """Run ``command``, send SIGINT once its stderr says ``ready``; return status, seconds it took to end, all of stderr."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder) as process:
        assert process.stderr is not None
        said = b""
        try:
            while ready not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            said += process.stderr.read()
            return process.wait(20), time.monotonic() - started, said
        finally:
            process.kill()


def test_ctrl_c_ends_a_fetch_within_two_seconds_and_says_that_it_resumes(daemon: FakeDaemon) -> None:
    daemon.events, daemon.hang = [progress(4096, 8192)], True
    status, took, said = _interrupt([sys.executable, "-m", "p2pkv.cli.app", "fetch", CID], b"50 %")
    assert status == 130
    assert took < 2
    assert said.endswith(
        b"p2pkv: interrupted [interrupted]\n       What arrived is kept: run the same command again to resume.\n"
    )
    assert daemon.left.wait(5), "the daemon hears that the client is gone"


_STUBBORN = """
import sys, time
from p2pkv.cli.interrupts import handle_interrupts
with handle_interrupts():
    end, word = time.monotonic() + 15, "ready"
    while time.monotonic() < end:
        try:
            print(word, file=sys.stderr, flush=True)
            time.sleep(end - time.monotonic())
        except KeyboardInterrupt:
            word = "swallowed"
"""


def test_code_that_swallows_ctrl_c_is_ended_within_two_seconds() -> None:
    status, took, said = _interrupt([sys.executable, "-c", _STUBBORN], b"ready")
    assert (status, said) == (130, b"ready\nswallowed\n")
    assert took < 2


_IN_TEXT = """
import sys, time
from p2pkv.cli.interrupts import handle_interrupts
with handle_interrupts():
    try:
        print("ready", file=sys.stderr, flush=True)
        exec("time.sleep(15)")
    except KeyboardInterrupt:
        print("cleaned up", file=sys.stderr)
sys.exit(130)
"""


def test_an_interrupt_in_code_run_from_text_has_an_exit_status_too(tmp_path: Path) -> None:
    (tmp_path / "in_text.py").write_text(_IN_TEXT)
    status, took, said = _interrupt([sys.executable, "-m", "in_text"], b"ready", folder=tmp_path)
    assert (status, said) == (130, b"ready\ncleaned up\n")
    assert took < 2


def test_the_second_ctrl_c_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _STUBBORN], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == b"swallowed\n"
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert process.wait(20) == 130
            assert time.monotonic() - started < 1
        finally:
            process.kill()


def test_peers_are_listed(cli: Cli, daemon: FakeDaemon) -> None:
    row = {
        "peer": "12D3KooWOther",
        "connected": True,
        "dht": True,
        "banned_until": None,
        "receiving_rate": 0.0,
        "wanted_blocks": 0,
        "snubbed": False,
        "sending_rate": 0.0,
        "outstanding_bytes": 0,
        "addresses": ["/ip4/192.0.2.1/tcp/4101", "/dns4/\x1b[31m/tcp/1"],
    }
    daemon.answers["GET", "/v1/peers"] = 200, {"peers": [row]}
    told = cli("peers")
    assert told.out.splitlines() == [
        "12D3KooWOther  connected, DHT",
        "  /ip4/192.0.2.1/tcp/4101",
        "  /dns4/\N{REPLACEMENT CHARACTER}[31m/tcp/1",
    ]
    assert cli("peers", "--json").document == {"peers": [row]}
    daemon.answers["GET", "/v1/peers"] = 200, {"peers": []}
    assert "--bootstrap" in cli("peers").err
