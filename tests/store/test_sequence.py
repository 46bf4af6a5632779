"""Sequence numbers: always upward, never twice, whatever clock, crash or neighbour does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, KeyFileError
from p2pkv.formats.dagcbor import MAX_INT
from p2pkv.store import files, sequence
from p2pkv.store.publisher_key import change_passphrase, read_key_file, write_publisher_key
from p2pkv.store.sequence import next_sequence, sequence_at, sequence_file
from tests.support.samples import OTHER_PUBLISHER

NOW = 1_800_000_000.0


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "me.key"


@pytest.fixture
def did(key: Path) -> str:
    return write_publisher_key(key, bytes(range(32)))


def test_numbers_go_up_whatever_the_clock_does(key: Path, did: str) -> None:
    rng = random.Random(5)
    given = [next_sequence(key, did, NOW + rng.choice([0, 0.0001, -86_400, 1, 3600])) for _ in range(100)]
    assert given == sorted(set(given))
    assert given[0] >= sequence_at(NOW) - 86_400_000


def test_a_file_that_was_lost_is_made_up_for_by_the_clock(key: Path, did: str) -> None:
    last = next_sequence(key, did, NOW)
    sequence_file(key).unlink()
    assert next_sequence(key, did, NOW + 0.001) > last


def test_a_number_that_was_heard_of_is_on_the_disk(key: Path, did: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = files._sync

    def sync(path: str | Path) -> None:
        synced.append(Path(path).name)
        real(path)

    monkeypatch.setattr(files, "_sync", sync)
    number = next_sequence(key, did, NOW)
    assert [name.startswith(f".{sequence_file(key).name}") for name in synced] == [True, False]
    assert synced[1] == key.parent.name
    assert sequence_file(key).read_text() == f"p2pkv sequence v1\n{did}\n{number}\n"
    assert sequence_file(key).stat().st_mode & 0o777 == 0o600


def test_a_number_that_cannot_be_written_is_not_given(key: Path, did: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next_sequence(key, did, NOW)

    def fail(path: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_sync", fail)
        with pytest.raises(DiskFullError):
            next_sequence(key, did, NOW)
    assert next_sequence(key, did, NOW) == first + 1


def test_threads_and_processes_never_share_a_number(key: Path, did: str) -> None:
    code = (
        "import sys; from pathlib import Path; from p2pkv.store.sequence import next_sequence\n"
        "print(*(next_sequence(Path(sys.argv[1]), sys.argv[2], 0) for _ in range(20)))"
    )

    def in_process(_: int) -> list[int]:
        ran = subprocess.run([sys.executable, "-c", code, str(key), did], capture_output=True, text=True, check=True)
        return [int(word) for word in ran.stdout.split()]

    with ThreadPoolExecutor(5) as pool:
        processes = pool.map(in_process, range(2))
        threads = [pool.submit(next_sequence, key, did, 0.0) for _ in range(20)]
        given = [thread.result() for thread in threads] + [number for each in processes for number in each]
    assert sorted(given) == list(range(1, 61))


def test_a_key_file_that_is_replaced_meanwhile_gives_no_number_twice(
    key: Path, did: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another passphrase is another file; whoever asks for a number then waits for the one before all the same."""
    read = sequence._read
    later: list[Future[int]] = []

    def read_and_replace(path: Path, publisher: str) -> int:
        last = read(path, publisher)
        if not later:
            change_passphrase(read_key_file(key), None, None)
            later.append(pool.submit(next_sequence, key, did, NOW))
            wait(later, timeout=0.2)
        return last

    monkeypatch.setattr(sequence, "_read", read_and_replace)
    with ThreadPoolExecutor(1) as pool:
        assert next_sequence(key, did, NOW) < later[0].result()


@pytest.mark.parametrize(
    "text",
    ["", "torn", "p2pkv sequence v1\n", "p2pkv sequence v1\n{did}\n", "p2pkv sequence v1\n{did}\n-1\n", "{did}\n{did}\n7\n"],
)
def test_a_damaged_file_gives_no_number(key: Path, did: str, text: str) -> None:
    sequence_file(key).write_text(text.format(did=did))
    sequence_file(key).chmod(0o600)
    with pytest.raises(KeyFileError):
        next_sequence(key, did, NOW)
    assert sequence_file(key).read_text() == text.format(did=did)


def test_another_publishers_file_gives_no_number(key: Path, did: str) -> None:
    next_sequence(key, did, NOW)
    with pytest.raises(KeyFileError, match="are those of"):
        next_sequence(key, OTHER_PUBLISHER, NOW)


def test_the_last_number_of_all_is_the_last(key: Path, did: str) -> None:
    assert next_sequence(key, did, (MAX_INT - 10**6) / 1000) <= MAX_INT
    sequence_file(key).write_text(f"p2pkv sequence v1\n{did}\n{MAX_INT}\n")
    with pytest.raises(KeyFileError, match="at their end"):
        next_sequence(key, did, NOW)
    assert not [name for name in os.listdir(key.parent) if name.endswith(".tmp")]
