"""Each check of the doctor, made to find what it looks for."""

from __future__ import annotations

import errno
import os
import pwd
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nacl.signing import SigningKey

from p2pkv import __version__
from p2pkv.client.doctor import home as home_checks, machine, node
from p2pkv.client.doctor.examine import examine
from p2pkv.client.doctor.finding import Finding, State
from p2pkv.errors import DaemonUnreachableError, KeyFileError
from p2pkv.formats.did import encode_did
from p2pkv.formats.revocations import Revocations
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import EARLIEST_TIME_S, MAX_CLOCK_SKEW_S, MIN_OPEN_FILES, STATEMENTS_STALE_S
from p2pkv.store.home import Holder, HomeLayout
from p2pkv.store.publisher_key import write_publisher_key
from p2pkv.store.secrets import load_or_create_node_seed
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.store import open_store
from p2pkv.store.survey import survey_index, survey_packs
from p2pkv.store.trust_file import TrustFile
from tests.support.artifacts import PUBLISHER, make_sample

PUBLIC, PRIVATE, LOOPBACK = "/ip4/8.8.8.8/tcp/4101", "/ip4/192.168.1.2/tcp/4101", "/ip4/127.0.0.1/tcp/4101"
STATUS: dict[str, Any] = {
    "version": __version__,
    "addresses": [PRIVATE],
    "uptime_s": 5.0,
    "connected_peers": ["a"],
    "dht_peers": ["a", "b"],
    "store": {"damaged_blocks": 0},
    "announcing": {"keys": 4, "announced": 4, "late_s": 0.0},
    "condition": {
        "pid": 1,
        "listen": ["/ip4/0.0.0.0/tcp/4101"],
        "listening": ["/ip4/0.0.0.0/tcp/4101"],
        "bulk_port": 4102,
        "inbound_connections": 1,
        "bootstrap_peers": 1,
        "bootstrap_connected": 1,
        "open_files_limit": 65_536,
    },
}


def told(condition: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**STATUS, **changes, "condition": {**STATUS["condition"], **(condition or {})}}


def by_name(home: Path) -> dict[str, Finding]:
    findings = examine(home)
    assert len({finding.name for finding in findings}) == len(findings)
    for finding in findings:
        assert bool(finding.advice) is (finding.state is not State.OK), finding
    return {finding.name: finding for finding in findings}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with an artifact, both keys and a trusted publisher."""
    folder = tmp_path / "home"
    sample = make_sample(range(600))
    with open_store(folder) as store:
        for cid, data in sample.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(sample.artifact, range(3))
    load_or_create_node_seed(folder)
    write_publisher_key(HomeLayout(folder).publisher_key, bytes(32))
    TrustFile(HomeLayout(folder).trust).add(PUBLISHER, "", 0)
    return folder


def snapshot(home: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*")}


def test_without_a_daemon_it_sees_the_home_and_changes_nothing(home: Path) -> None:
    before = snapshot(home)
    found = by_name(home)
    assert snapshot(home) == before
    wrong = {name for name, finding in found.items() if finding.state is State.PROBLEM}
    assert wrong == set()
    assert found["home"].found == f"{home}, yours alone"
    assert found["keys"].found == "the node's key and a publisher's key, readable by you alone"
    assert found["trust"].found == "1 trusted publisher"
    assert found["index"].found == "1 artifact, 1 of them complete"
    assert found["packs"].found.startswith(f"{len(make_sample(range(600)).blocks)} blocks in 1 pack, ")
    assert found["lock"].found == "free: no node has this home"
    assert found["daemon"].state is State.WARNING
    assert "`p2pkv-node`" in found["daemon"].advice
    of_node = {"version", "ports", "reachability", "DHT", "announcements"}
    assert {name for name in of_node if found[name].state is State.UNKNOWN} == of_node


def test_a_home_that_is_not_there_is_looked_at_and_not_made(tmp_path: Path) -> None:
    found = by_name(tmp_path / "nowhere")
    assert found["home"].state is State.WARNING
    assert found["trust"].state is State.WARNING
    assert "p2pkv trust add did:key:" in found["trust"].advice
    assert {found[name].state for name in ("keys", "lock", "index", "packs", "disk")} == {State.OK}
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert by_name(tmp_path / "file")["home"].state is State.PROBLEM


@pytest.mark.parametrize(("mode", "state"), [(0o750, State.WARNING), (0o770, State.PROBLEM), (0o703, State.PROBLEM)])
def test_a_home_that_is_open_to_others(home: Path, mode: int, state: State) -> None:
    home.chmod(mode)
    found = by_name(home)["home"]
    assert found.state is state
    assert found.advice == f"Run `chmod 700 {home}`."


def test_a_home_of_somebody_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 4242)
    found = home_checks.check_home(home)
    assert found.state is State.PROBLEM
    assert f"sudo -u {pwd.getpwuid(home.stat().st_uid).pw_name}" in found.advice


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != HomeLayout(home).blocks)
    found = home_checks.check_home(home)
    assert (found.state, "blocks cannot be" in found.found) == (State.PROBLEM, True)
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    assert "read-only" in home_checks.check_home(home).found


def test_a_key_that_others_may_read_and_one_that_is_damaged(home: Path) -> None:
    layout = HomeLayout(home)
    layout.node_key.chmod(0o640)
    with pytest.raises(KeyFileError):
        home_checks.check_keys(home)
    found = by_name(home)["keys"]
    assert (found.state, found.advice.startswith(f"Run `chmod 600 {layout.node_key}`")) == (State.PROBLEM, True)
    layout.node_key.chmod(0o600)
    layout.publisher_key.write_text("nonsense")
    assert by_name(home)["keys"].state is State.PROBLEM


@pytest.mark.parametrize("name", ["keys", "namespaces", "grants", "issued_grants"])
@pytest.mark.parametrize("inside", [False, True])
def test_secrets_that_others_may_look_into(home: Path, name: str, inside: bool) -> None:
    layout = HomeLayout(home)
    folder: Path = getattr(layout, name)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "a").touch(mode=0o600)
    assert by_name(home)["keys"].state is State.OK
    exposed = folder / "a" if inside else folder
    exposed.chmod(exposed.stat().st_mode | 0o010)
    found = by_name(home)["keys"]
    assert (found.state, str(exposed) in found.found) == (State.PROBLEM, True)
    assert f"chmod -R go= {exposed}" in found.advice


def test_revocations_that_were_not_heard_of_for_long(home: Path) -> None:
    """A publisher who never took anything back says nothing that could be heard."""
    key, other = SigningKey(bytes([7]) * 32), SigningKey(bytes([8]) * 32)
    did = encode_did(bytes(key.verify_key))
    files = StatementFiles(HomeLayout(home).statements)
    now = time.time()
    assert by_name(home)["revocations"].state is State.OK
    for signer in (key, other):  # the other one is trusted by nobody
        listed = Revocations(publisher=encode_did(bytes(signer.verify_key)), sequence=1, created=0, items=())
        files.hear(SignedStatement.sign(listed, signer))
    TrustFile(HomeLayout(home).trust).add(did, "", 0)
    assert by_name(home)["revocations"].found == "heard within the last day, of 1 trusted publisher"
    found = home_checks.check_revocations(home, now + STATEMENTS_STALE_S + 60)
    assert (found.state, did in found.found) == (State.WARNING, True)
    files.note_answers({did: now + 3600})
    assert home_checks.check_revocations(home, now + STATEMENTS_STALE_S + 60).state is State.OK
    assert home_checks.check_revocations(home, now + STATEMENTS_STALE_S + 3700).state is State.WARNING


def test_a_damaged_trust_list(home: Path) -> None:
    HomeLayout(home).trust.write_text("nonsense")
    assert by_name(home)["trust"].state is State.PROBLEM


@pytest.mark.parametrize("how", ["overwritten", "newer", "torn", "where nobody looks"])
def test_an_index_that_cannot_be_used(home: Path, how: str) -> None:
    path = HomeLayout(home).index
    if how == "newer":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
    elif how == "where nobody looks":
        with closing(sqlite3.connect(path)) as connection:
            (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'segments_by_node'").fetchone()
            (size,) = connection.execute("PRAGMA page_size").fetchone()
        with path.open("r+b") as file:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)
    else:
        data = bytearray(path.read_bytes())
        # A page in the middle; or all of it.
        data[:] = b"nonsense" * 1000 if how == "overwritten" else data[:4096] + bytes(len(data) - 4096)
        path.write_bytes(data)
    found = by_name(home)["index"]
    assert found.state is State.PROBLEM
    assert ("upgrade" if how == "newer" else "Restart the node") in found.advice


def test_an_index_that_was_lost_and_one_that_was_made_anew(home: Path) -> None:
    layout = HomeLayout(home)
    layout.index.unlink()
    found = by_name(home)["index"]
    assert (found.state, found.found) == (
        State.WARNING,
        f"missing, although there are {len(make_sample(range(600)).blocks)} blocks",
    )
    assert "Start the node" in found.advice
    layout.index.write_bytes(b"nonsense")
    with open_store(home):
        pass
    found = by_name(home)["index"]
    assert found.state is State.WARNING
    assert "1 artifact, 1 of them complete; it was made anew, and the damaged one is index.sqlite.damaged-1" in found.found
    assert f"{home}/index.sqlite.damaged-1" in found.advice
    (home / "index.sqlite.damaged-1").unlink()
    assert by_name(home)["index"].state is State.OK


def test_the_index_of_a_store_in_use_shows_what_was_committed_last(home: Path) -> None:
    with open_store(home) as store:
        store.index.remove_artifact(make_sample(range(600)).cid)
        survey = survey_index(HomeLayout(home).index)
        assert survey is not None
        assert (survey.artifacts, survey.newest) == (0, None)


def test_an_older_index_without_tables_is_empty(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 0")
        connection.execute("VACUUM")
    survey = survey_index(tmp_path / "index.sqlite")
    assert survey is not None
    assert survey.artifacts == 0


def test_packs_that_cannot_be_read_and_blocks_that_were_damaged(home: Path) -> None:
    folder = HomeLayout(home).blocks
    good = survey_packs(folder)
    assert (good.packs, good.unreadable) == (1, ())
    assert good.bytes == sum(map(len, make_sample(range(600)).blocks.values()))
    (folder / "00000077.pack").mkdir()
    (folder / "00000078.pack").write_text("something else")
    (folder / "notes.txt").write_text("")
    survey = survey_packs(folder)
    assert survey.unreadable == ("00000077.pack", "00000078.pack")
    assert (survey.packs, survey.blocks) == (1, good.blocks)
    found = by_name(home)["packs"]
    assert (found.state, "00000077.pack" in found.found, "(and 1 more)" in found.found) == (State.PROBLEM, True, True)
    assert home_checks.check_packs(good, damaged=2).state is State.WARNING
    assert home_checks.check_packs(good, damaged=0).state is State.OK


NOW = EARLIEST_TIME_S + 10**7


@pytest.mark.parametrize(
    ("now", "newest", "synchronised", "state"),
    [
        (NOW, None, True, State.OK),
        (NOW, NOW + MAX_CLOCK_SKEW_S - 1, True, State.OK),
        (NOW, None, False, State.UNKNOWN),
        (NOW, None, None, State.UNKNOWN),
        (0, None, True, State.PROBLEM),
        (EARLIEST_TIME_S - 1, None, None, State.PROBLEM),
        (NOW, NOW + MAX_CLOCK_SKEW_S + 1, True, State.PROBLEM),
    ],
)
def test_the_clock(now: int, newest: int | None, synchronised: bool | None, state: State) -> None:
    found = machine.check_clock(now, newest, synchronised)
    assert found.state is state
    assert bool(found.advice) is (state is not State.OK)


def test_a_clock_that_publishers_disagree_with_is_seen(home: Path) -> None:
    """One of them may be wrong; two are not, by the same hour."""
    records = StatementFiles(HomeLayout(home).statements)
    later = int(time.time()) + 3600

    def sign(key: SigningKey, created: int) -> None:
        publisher = encode_did(bytes(key.verify_key))
        listed = Revocations(publisher=publisher, sequence=created, created=created, items=())
        records.hear(SignedStatement.sign(listed, key))

    sign(SigningKey(bytes(31) + b"1"), later)
    sign(SigningKey(bytes(31) + b"2"), later - 3600)
    assert "publishers signed" not in by_name(home)["clock"].found
    sign(SigningKey(bytes(31) + b"3"), 2**63 - 1)
    found = by_name(home)["clock"]
    assert found.state is State.PROBLEM
    assert "2 publishers signed something" in found.found


def test_a_clock_that_went_back_is_seen_in_the_index(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: EARLIEST_TIME_S + 1.0)
    found = by_name(home)["clock"]
    assert (found.state, "the clock went back" in found.found) == (State.PROBLEM, True)


def test_the_system_tells_about_its_clock_or_does_not() -> None:
    assert machine.clock_is_synchronised() in (True, False, None)


def test_open_files() -> None:
    assert machine.check_open_files(MIN_OPEN_FILES, of_node=True).state is State.OK
    assert machine.check_open_files(None, of_node=True).state is State.OK
    few = machine.check_open_files(MIN_OPEN_FILES - 1, of_node=False)
    assert (few.state, "ulimit -n" in few.advice) == (State.WARNING, True)


def test_a_lock_that_cannot_be_named() -> None:
    assert node.check_lock(Holder(7, confirmed=True)).found == "held by process 7"
    for holder in (Holder(7, confirmed=False), Holder(None, confirmed=False)):
        assert node.check_lock(holder).state is State.WARNING


def test_a_daemon_that_is_stuck() -> None:
    error = DaemonUnreachableError("it does not answer")
    found = node.check_daemon(error, Holder(7, confirmed=True))
    assert (found.state, "`kill 7`" in found.advice) == (State.PROBLEM, True)
    found = node.check_daemon(error, Holder(7, confirmed=False))
    assert (found.state, "kill" in found.advice) == (State.PROBLEM, False)


NOBODY: dict[str, Any] = {"dht_peers": [], "connected_peers": []}
NO_BOOTSTRAP = {"bootstrap_peers": 0, "bootstrap_connected": 0}


@pytest.mark.parametrize(
    ("check", "status", "state", "word"),
    [
        (node.check_version, told(), State.OK, __version__),
        (node.check_version, told(version="9.9"), State.WARNING, "9.9"),
        (node.check_ports, told(), State.OK, "4102"),
        (node.check_ports, told({"bulk_port": None}), State.OK, "without the bulk lane"),
        (node.check_ports, told({"listening": [LOOPBACK], "listen": [LOOPBACK]}), State.WARNING, "loopback"),
        (node.check_ports, told({"listening": [LOOPBACK], "listen": ["/ip4/127.0.0.1/tcp/0"]}), State.WARNING, "loopback"),
        (node.check_ports, told({"listening": [PRIVATE]}), State.PROBLEM, "told to listen on"),
        (node.check_ports, told({"listening": []}), State.PROBLEM, "nothing"),
        (node.check_reachability, told(), State.OK, "1 connection"),
        (node.check_reachability, told({"inbound_connections": 0}), State.UNKNOWN, "private"),
        (node.check_reachability, told({"inbound_connections": 0}, addresses=[PUBLIC]), State.UNKNOWN, "public"),
        (node.check_reachability, told({"inbound_connections": 0}, addresses=["/dns4/a.b/tcp/1"]), State.UNKNOWN, "public"),
        (node.check_reachability, told({"inbound_connections": 0}, addresses=[LOOPBACK]), State.WARNING, "loopback"),
        (node.check_dht, told(), State.OK, "1 of 1 bootstrap peer"),
        (node.check_dht, told({"bootstrap_connected": 0}), State.OK, "2 peers in"),
        (node.check_dht, told({"bootstrap_connected": 0}, **NOBODY), State.PROBLEM, "0 of 1 bootstrap peer"),
        (node.check_dht, told(NO_BOOTSTRAP, **NOBODY), State.WARNING, "no bootstrap peers"),
        (node.check_announcements, told(), State.OK, "4 of 4 keys"),
        (
            node.check_announcements,
            told(announcing={"keys": 4, "announced": 1, "late_s": 61.0}),
            State.WARNING,
            "1 min 01 s late",
        ),
    ],
)
def test_what_a_node_tells(check: Callable[[Any], Finding], status: dict[str, Any], state: State, word: str) -> None:
    found = check(status)
    assert found.state is state
    assert word in found.found
    assert bool(found.advice) is (state is not State.OK)


def test_what_cannot_be_looked_at_is_a_problem_and_no_crash(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "statvfs", refuse)
    found = by_name(home)
    assert (found["disk"].state, found["home"].state) == (State.PROBLEM, State.PROBLEM)
    assert "owns the p2pkv home" in found["disk"].advice
