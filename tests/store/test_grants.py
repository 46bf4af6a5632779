"""Files of grants and namespaces, and private artifacts in a store that cannot read them."""

from __future__ import annotations

import stat
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.errors import GrantMissingError, KeyFileError, SignatureError, StoreError, UsageError
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import chain
from p2pkv.store import grants
from p2pkv.store.car_file import export_car, import_car
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.namespaces import create_namespace, list_namespaces, read_namespace
from p2pkv.store.store import Store, open_store
from tests.formats.test_grant import GRANT
from tests.support.artifacts import KEY, model
from tests.support.private import NAMESPACE, PrivateSample, find_secrets, make_private, secrets_of

TOKENS = list(range(70_000, 70_600))


def signed(grant: Grant = GRANT, key: SigningKey = KEY) -> bytes:
    return SignedStatement.sign(grant, key).encode()


def test_a_grant_is_kept_for_its_owner_alone_and_found_by_its_artifact(tmp_path: Path) -> None:
    files = GrantFiles(tmp_path)
    assert list(files) == []
    assert files.add(signed()) == GRANT
    assert list(files) == [GRANT.manifest]
    assert files.get(GRANT.manifest) == GRANT
    (path,) = HomeLayout(tmp_path).grants.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (path.parent / "notes.txt").write_text("mine")
    assert list(files) == [GRANT.manifest]
    assert files.remove(GRANT.manifest)
    assert not files.remove(GRANT.manifest)
    with pytest.raises(GrantMissingError):
        files.get(GRANT.manifest)


def test_two_that_are_added_at_once_leave_the_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = GrantFiles(tmp_path)
    read, newer = grants._read, replace(GRANT, sequence=GRANT.sequence + 1)
    later: list[Future[Grant]] = []

    def read_and_add(path: Path) -> Grant | None:
        before = read(path)
        if not later:
            later.append(pool.submit(files.add, signed(newer)))
            wait(later, timeout=0.2)
        return before

    monkeypatch.setattr(grants, "_read", read_and_add)
    with ThreadPoolExecutor(1) as pool:
        files.add(signed())
        assert later[0].result() == files.get(GRANT.manifest) == newer


def test_a_newer_grant_replaces_an_older_one_and_not_the_other_way(tmp_path: Path) -> None:
    files = GrantFiles(tmp_path)
    newer = replace(GRANT, sequence=GRANT.sequence + 1, expires=None)
    files.add(signed())
    files.add(signed(newer))
    with pytest.raises(UsageError, match="newer"):
        files.add(signed())
    assert files.get(GRANT.manifest) == newer
    other = SigningKey(bytes([9]) * 32)
    files.add(signed(replace(GRANT, publisher=encode_did(bytes(other.verify_key))), other))


def test_a_forged_or_damaged_grant_is_refused(tmp_path: Path) -> None:
    files = GrantFiles(tmp_path)
    with pytest.raises(SignatureError):
        files.add(replace(SignedStatement.decode(signed()), signature=bytes(64)).encode())
    files.add(signed())
    (path,) = HomeLayout(tmp_path).grants.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="damaged"):
        files.get(GRANT.manifest)


def test_a_namespace_is_made_once_and_told_to_nobody(tmp_path: Path) -> None:
    path = create_namespace(tmp_path, "team", NAMESPACE)
    create_namespace(tmp_path, "b.2_c-d", bytes(32))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_namespace(tmp_path, "team") == NAMESPACE
    (path.parent / ".hidden.namespace").write_text("")
    assert list_namespaces(tmp_path) == ["b.2_c-d", "team"]
    with pytest.raises(KeyFileError, match="not overwritten"):
        create_namespace(tmp_path, "team", bytes(32))
    assert read_namespace(tmp_path, "team") == NAMESPACE
    with pytest.raises(KeyFileError, match="no namespace other"):
        read_namespace(tmp_path, "other")
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="open to other users"):
        read_namespace(tmp_path, "team")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "Team", "a" * 65, "a\n", "a b", "-a"])
def test_what_is_no_name_of_a_namespace(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        create_namespace(tmp_path, name, NAMESPACE)


@pytest.mark.parametrize("text", ["", "p2pkv namespace v1\n", "p2pkv namespace v1\nzz\n", "p2pkv node key v1\n" + "0" * 64])
def test_a_damaged_namespace_is_no_other(tmp_path: Path, text: str) -> None:
    path = create_namespace(tmp_path, "team", NAMESPACE)
    path.write_text(text)
    with pytest.raises(KeyFileError):
        read_namespace(tmp_path, "team")


def plant(store: Store, sample: PrivateSample) -> None:
    for cid, data in sample.blocks.items():
        store.write(cid, data)
    store.index.add_artifact(sample.open(), range(len(sample.manifest.segments)))


def test_a_store_keeps_carries_and_finds_again_what_it_cannot_read(tmp_path: Path) -> None:
    """Two artifacts with a common prefix; one travels as a file, and the index is lost and made anew."""
    one, two = make_private(TOKENS), make_private([*TOKENS[:512], 1], artifact_key=bytes(32))
    with open_store(tmp_path / "a") as store:
        plant(store, one)
        plant(store, two)
        export_car(store, one.cid, tmp_path / "one.car")
    with open_store(tmp_path / "b") as store:
        imported = import_car(store, tmp_path / "one.car", judge=lambda manifest, cid: None)
        assert imported.artifact.manifest == one.manifest
    HomeLayout(tmp_path / "a").index.unlink()
    with open_store(tmp_path / "a") as store:
        listed = {row.manifest_cid: row.complete for row in store.index.artifacts()}
        assert listed == {one.cid: True, two.cid: True}
        for namespace in (b"", NAMESPACE):
            assert store.match(list(chain(model().model_id, TOKENS, namespace=namespace))) == []
    known = list(secrets_of(one.privacy, model().model_id, TOKENS, [data for row in one.layers for data in row]))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert find_secrets(path.read_bytes(), known) == [], path


def test_a_place_in_one_private_artifact_says_nothing_of_another_place(tmp_path: Path) -> None:
    """A node that stands at two places fits one of them: what a rebuild found at the first does not count at the second."""
    sample = make_private(TOKENS)
    node = sample.segment(0)
    moved = sample.with_segments([replace(node, extra={"n": 1}), node, sample.segment(2)])
    with open_store(tmp_path) as store:
        plant(store, sample)
        for cid, data in moved.blocks.items():
            store.write(cid, data)
        store.write(moved.cid, moved.envelope.encode())
    HomeLayout(tmp_path).index.unlink()
    with open_store(tmp_path) as store:
        assert set(store.index.held_keys(sample.cid)) == {0, 1, 2}
        assert set(store.index.held_keys(moved.cid)) == {0, 2}
