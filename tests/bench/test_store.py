"""The store bench: that its figures are medians, that it reads what it says, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.artifacts import Published, Shape, build, random_segments
from bench.store.disk import in_turn, read_plain, read_verified, write_plain
from bench.store.figures import OPEN_S, PUBLISH_SHARE, READ_VERIFIED_MIB_S, figures, promises
from bench.store.opening import Homes, filled_homes, measure_opening
from bench.store.show import show_table
from p2pkv.errors import IntegrityError
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.store.home import HomeLayout
from p2pkv.store.staging import open_staging
from p2pkv.store.store import open_store
from p2pkv.store.stored_blocks import StoredBlocks
from tests.support.stores import flip_block

SMALL = Shape("small", 2, LayerGeometry(LayerKind.FULL, kv_heads=1, k_dim=8, v_dim=8))
SEGMENTS = random_segments(SMALL, 2)
BLOCKS = 600
CASES = ("publish", "plain_write", "read_verified", "plain_read", "open", "open_killed")


def rows(**changed: list[float]) -> list[dict[str, Any]]:
    """Return three repetitions of each case that keep every promise, but for what is changed: rates, or seconds to open."""
    values = {
        "publish": [1000.0, 600.0, 800.0], "plain_write": [900.0, 1000.0, 5000.0], "read_verified": [2000.0, 2100.0, 1900.0],
        "plain_read": [9000.0, 8000.0, 7000.0], "open": [0.3, 0.2, 5.0], "open_killed": [0.4, 0.5, 0.6],
    } | changed  # fmt: skip
    return [
        {"case": case, "repetition": number} | ({"seconds": value} if case.startswith("open") else disk(value))
        for case in CASES
        for number, value in enumerate(values[case], 1)
    ]


def disk(mib_s: float) -> dict[str, float]:
    return {"data_mib": 256.0, "seconds": 256 / mib_s, "mib_s": mib_s}


# --- figures -----------------------------------------------------------------------------------------------------------


def test_figures_are_medians() -> None:
    assert figures(rows(), 100_000) == {
        "publish_mib_s": 800.0, "plain_write_mib_s": 1000.0, "read_verified_mib_s": 2000.0, "plain_read_mib_s": 8000.0,
        "publish_share": 0.8, "open_100k_s": 0.3, "open_killed_100k_s": 0.5,
    }  # fmt: skip


def test_a_figure_says_how_many_blocks_were_opened() -> None:
    assert {"open_10k_s", "open_killed_10k_s"} < set(figures(rows(), 10_000))


def test_promises_are_judged_by_medians() -> None:
    assert {case: promise.kept for case, promise in promises(rows()).items()} == dict.fromkeys(
        ("publish", "read_verified", "open", "open_killed"), True
    )


@pytest.mark.parametrize(
    ("case", "kept", "missed"),
    [
        ("publish", 1000 * PUBLISH_SHARE, 999 * PUBLISH_SHARE),
        ("read_verified", READ_VERIFIED_MIB_S, READ_VERIFIED_MIB_S - 1),
        ("open", 0.99 * OPEN_S, OPEN_S),
        ("open_killed", 0.99 * OPEN_S, OPEN_S),
    ],
)
def test_a_promise_is_kept_up_to_its_bound(case: str, kept: float, missed: float) -> None:
    assert promises(rows(**{case: [kept] * 3}))[case].kept
    assert not promises(rows(**{case: [missed] * 3}))[case].kept


def test_the_table_says_what_was_missed() -> None:
    shown = StringIO()
    show_table(Console(file=shown, width=120), rows(read_verified=[900.0, 1000.0, 1100.0]))
    lines = {line.split()[0]: line for line in shown.getvalue().splitlines() if line.strip()}
    assert lines["publish"].split()[1:7] == ["800", "MiB/s", "600", "MiB/s", "1,000", "MiB/s"]
    assert lines["publish"].rstrip().endswith("0.80 of plain_write; at least 0.5: kept")
    assert lines["read_verified"].rstrip().endswith("at least 1,536 MiB/s: missed")
    assert lines["open"].split()[1:7] == ["300", "ms", "5.00", "s", "200", "ms"]


# --- publishing and reading --------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """The small artifact, adopted by the store in ``tmp_path``."""
    with open_store(tmp_path) as store, open_staging(tmp_path) as staging:
        built = build(SMALL, SEGMENTS, staging.write)
        store.adopt(staging.name, built.cids)
    return built


def test_cases_take_turns_in_going_first() -> None:
    assert [in_turn({"a": 1, "b": 2}, repetition) for repetition in (1, 2, 3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_every_block_that_is_read_is_hashed(tmp_path: Path, published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Cid] = []
    matches = Cid.matches

    def counting(cid: Cid, data: bytes | bytearray | memoryview) -> bool:
        hashed.append(cid)
        return matches(cid, data)

    monkeypatch.setattr(Cid, "matches", counting)
    read_verified(StoredBlocks(HomeLayout(tmp_path).blocks), published.cids, bytearray(SMALL.block_bytes))
    assert hashed == list(published.cids)
    assert set(hashed) >= {Cid.of_block(layer) for layers in SEGMENTS for layer in layers}


@pytest.mark.parametrize("number", [0, -1])
def test_one_flipped_bit_ends_the_reading(tmp_path: Path, published: Published, number: int) -> None:
    flip_block(tmp_path, published.cids[number], 77)
    with pytest.raises(IntegrityError):
        read_verified(StoredBlocks(HomeLayout(tmp_path).blocks), published.cids, bytearray(SMALL.block_bytes))


def test_the_plain_file_has_the_same_bytes(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", SEGMENTS)
    assert (tmp_path / "plain").read_bytes() == b"".join(layer for layers in SEGMENTS for layer in layers)
    buffer = bytearray(SMALL.block_bytes)
    read_plain(tmp_path / "plain", buffer)
    assert buffer == SEGMENTS[-1][-1]


# --- opening -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    with filled_homes(tmp_path_factory.mktemp("homes"), BLOCKS) as homes:
        yield homes


def test_both_homes_are_opened_again_and_again(tmp_path: Path, homes: Homes) -> None:
    for repetition, names in ((1, ["open", "open_killed"]), (2, ["open_killed", "open"])):
        measured = list(measure_opening(homes, tmp_path, BLOCKS, repetition))
        assert [row["case"] for row in measured] == names
        assert all(row["blocks"] >= BLOCKS and row["seconds"] > 0 for row in measured)
    assert not list(tmp_path.iterdir())


def test_what_a_kill_left_lists_all_artifacts(tmp_path: Path, homes: Homes) -> None:
    (tmp_path / "home").symlink_to(homes.closed)
    with open_store(tmp_path / "home") as store:
        known = store.statistics()
    assert known.artifacts == known.complete_artifacts > 0


def test_a_home_that_lacks_blocks_is_no_measurement(tmp_path: Path, homes: Homes) -> None:
    with pytest.raises(RuntimeError, match="blocks were found"):
        list(measure_opening(homes, tmp_path, 10 * BLOCKS, 1))


def test_a_home_that_was_opened_is_not_one_that_a_kill_left(tmp_path: Path, homes: Homes) -> None:
    with pytest.raises(RuntimeError, match="was not left as open_killed"):
        list(measure_opening(Homes(homes.closed, homes.closed), tmp_path, BLOCKS, 2))


# --- all together ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_bench_runs(tmp_path: Path) -> None:
    output = tmp_path / "new" / "store.json"
    command = [sys.executable, "-m", "bench.store", "--quick", "--json", str(output), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert [row["case"] for row in result["rows"]] == list(CASES)
    assert result["figures"] == figures(result["rows"], result["blocks"])
    assert "medians" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["new"], "homes and files are gone"
