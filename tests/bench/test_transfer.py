"""The transfer bench: what it counts, what it refuses to count, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.artifacts import LLAMA, SMOLLM2, Published, Shape, build, random_segments
from bench.settle import cpu_seconds
from bench.transfer import rivals
from bench.transfer.__main__ import measure_all
from bench.transfer.cases import CASES, Case, Setting, select
from bench.transfer.figures import figures
from bench.transfer.measure import Measurement, Meter
from bench.transfer.nodes import verify
from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.store.staging import open_staging
from p2pkv.store.store import open_store
from p2pkv.units import KIB, MIB
from tests.support.stores import flip_block

SMALL = Shape("small", 2, LayerGeometry(LayerKind.FULL, kv_heads=1, k_dim=8, v_dim=8))
FIGURES = {
    "p2pkv_1_mib_s", "p2pkv_4_mib_s", "p2pkv_192k_1_mib_s", "stream_1_mib_s", "libp2p_1_mib_s", "tls_limit_mib_s",
    "first_byte_s", "receiver_cpu_s", "rss_growth_mib",
}  # fmt: skip


def measurement(data_bytes: int = 64 * MIB, **changed: Any) -> Measurement:
    values: dict[str, Any] = {
        "data_bytes": data_bytes, "seconds": 0.5, "first_byte_s": 0.01, "receiver_cpu_s": 0.2, "senders_cpu_s": 0.1,
        "rss_growth_bytes": 3 * MIB, "wire_bytes": data_bytes,
    }  # fmt: skip
    return Measurement(**values | changed)


def row(case: str, **changed: Any) -> dict[str, Any]:
    return {"case": case, "repetition": 1, **measurement(**changed).to_row()}


# --- figures -----------------------------------------------------------------------------------------------------------


def test_figures_are_medians() -> None:
    rows = [row("libtorrent_1", seconds=seconds) for seconds in (64.0, 1.0, 0.5)]
    assert figures(rows) == {"libtorrent_1_mib_s": 64.0}


def test_what_p2pkv_promises_is_told_of_the_worse_case() -> None:
    one = row("p2pkv_1", first_byte_s=0.04, receiver_cpu_s=0.1, wire_bytes=65 * MIB)
    four = row("p2pkv_4", first_byte_s=0.02, receiver_cpu_s=0.3, rss_growth_bytes=9 * MIB, wire_bytes=66 * MIB)
    found = figures([one, four])
    assert found["first_byte_s"] == 0.04
    assert found["receiver_cpu_s"] == pytest.approx(4 * 0.3), "told for 256 MiB"
    assert found["rss_growth_mib"] == 9
    assert (found["wire_ratio_1"], found["wire_ratio_4"]) == (65 / 64, 66 / 64)


def test_what_was_not_counted_is_no_figure() -> None:
    assert not {"wire_ratio_1", "wire_ratio_4"} & set(figures([row("p2pkv_1", wire_bytes=None)]))


# --- cases -------------------------------------------------------------------------------------------------------------


def test_cases_are_selected_by_name_and_by_system() -> None:
    assert [case.name for case in select(["iroh", "tls_limit"])] == ["iroh_1", "iroh_4", "tls_limit"]
    assert select([]) == list(CASES)


def test_shapes_have_the_blocks_of_their_models() -> None:
    assert (LLAMA.block_bytes, SMOLLM2.block_bytes) == (MIB, 192 * KIB)
    assert LLAMA.segments(256 * MIB) == 8


@contextmanager
def opened(name: str, order: list[str], failing: Callable[[], None]) -> Iterator[Callable[[], Measurement]]:
    def measure() -> Measurement:
        order.append(name)
        failing()
        return measurement()

    yield measure


def fail() -> None:
    raise RuntimeError("no answer")


def case(name: str, order: list[str], failing: Callable[[], None] = lambda: None, **options: Any) -> Case:
    return Case(name, name, lambda setting, folder: opened(name, order, failing), **options)


def test_cases_take_turns_and_a_failure_ends_only_its_own(tmp_path: Path) -> None:
    order: list[str] = []
    cases = [case("a", order), case("bad", order, fail), case("b", order)]
    rows, skipped, failed = measure_all(cases, Setting(tmp_path, MIB, isolated=True), 2)
    assert order == ["a", "bad", "b", "a", "b"]
    assert [(row["case"], row["repetition"]) for row in rows] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert failed == {"bad": "RuntimeError: no answer"}
    assert not skipped


def test_what_cannot_be_measured_is_skipped_with_the_reason(tmp_path: Path) -> None:
    order: list[str] = []
    cases = [case("absent", order, package="no_such_package"), case("talkative", order, needs_isolation=True)]
    rows, skipped, failed = measure_all(cases, Setting(tmp_path, MIB, isolated=False), 1)
    assert "no_such_package is not installed" in skipped["absent"]
    assert "network namespace" in skipped["talkative"]
    assert not rows + order + list(failed)


# --- measuring ---------------------------------------------------------------------------------------------------------


def test_the_meter_sees_the_peak_of_the_receivers_memory() -> None:
    before = bytearray(b"x") * (200 * MIB)
    del before
    meter = Meter(os.getpid(), [], isolated=False)
    grown = bytearray(b"x") * (48 * MIB)
    del grown
    usage = meter.stop()
    assert 40 * MIB < usage.peak_growth_bytes < 100 * MIB
    assert usage.wire_bytes is None


def test_the_meter_counts_the_callers_cpu_only_where_it_works_for_it() -> None:
    def burn() -> None:
        until = cpu_seconds(os.getpid()) + 0.05
        while cpu_seconds(os.getpid()) < until:
            pass

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        alone, ours = (Meter(idle.pid, [], isolated=False, calls_here=here) for here in (False, True))
        burn()
        counted = ours.stop().receiver_cpu_s - alone.stop().receiver_cpu_s
        idle.kill()
    assert counted > 0.03


def test_a_namespace_counts_what_goes_through_it() -> None:
    program = """
import socket
from bench.transfer.netns import isolate, loopback_bytes
if isolate():
    before = loopback_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        with server.accept()[0] as accepted:
            client.sendall(bytes(10_000))
            print(before, len(accepted.recv(10_000, socket.MSG_WAITALL)), loopback_bytes())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("this system makes no network namespace for us")
    before, received, after = map(int, done.stdout.split())
    assert (before, received) == (0, 10_000)
    assert 10_000 < after < 12_000


# --- verification ------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """The small artifact, adopted by the store in ``tmp_path``."""
    with open_store(tmp_path) as store, open_staging(tmp_path) as staging:
        built = build(SMALL, random_segments(SMALL, 2), staging.write)
        store.adopt(staging.name, built.cids)
    return built


def report(published: Published, **changed: Any) -> dict[str, Any]:
    return {"local_bytes": 0, "bytes_by_peer": {"peer": published.data_bytes}} | changed


def test_all_seeders_build_the_same_artifact(tmp_path: Path, published: Published) -> None:
    with open_staging(tmp_path / "other") as staging:
        assert build(SMALL, random_segments(SMALL, 2), staging.write) == published


def test_what_was_fetched_whole_is_verified(tmp_path: Path, published: Published) -> None:
    verify(tmp_path, published, report(published))


@pytest.mark.parametrize("number", [0, -1])
def test_one_flipped_bit_is_noticed(tmp_path: Path, published: Published, number: int) -> None:
    flip_block(tmp_path, published.cids[number], 77)
    with pytest.raises(IntegrityError):
        verify(tmp_path, published, report(published))


def test_a_missing_block_is_noticed(tmp_path: Path, published: Published) -> None:
    (tmp_path / "other").mkdir()
    with open_store(tmp_path / "other"):
        pass
    with pytest.raises(NotFoundError):
        verify(tmp_path / "other", published, report(published))


@pytest.mark.parametrize("changed", [{"local_bytes": 1}, {"bytes_by_peer": {"peer": 1}}])
def test_data_that_was_there_before_does_not_count(tmp_path: Path, published: Published, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="not all of the data"):
        verify(tmp_path, published, report(published, **changed))


@pytest.mark.slow
def test_other_bytes_than_were_sent_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(MIB))
    with rivals.open_peers(tmp_path / "right", 1, data, module="tls_stream", isolated=False) as measure:
        assert measure().data_bytes == MIB
    monkeypatch.setattr(rivals, "file_digest", lambda path: "of something else")
    with (
        rivals.open_peers(tmp_path / "wrong", 1, data, module="tls_stream", isolated=False) as measure,
        pytest.raises(RuntimeError, match="other bytes than were sent"),
    ):
        measure()


def test_a_peer_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"No module named bench\.transfer\.peers\.nobody"):
        rivals.PeerProcess("nobody", ["seed"], tmp_path / "log")


# --- all together ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bench_runs(tmp_path: Path) -> None:
    output = tmp_path / "transfer.json"
    command = [sys.executable, "-m", "bench.transfer", "--quick", "--mib", "16", "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    measured, skipped = {row["case"] for row in result["rows"]}, set(result["skipped"])
    assert measured | skipped == {case.name for case in CASES}
    assert not measured & skipped
    assert set(result["figures"]) >= FIGURES
    if result["isolated"]:
        assert all(row["wire_ratio"] > 1 for row in result["rows"])
