"""``renew`` of a private artifact: the same blocks and key under a new manifest, and new grants for those who may read it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey

from p2pkv.artifact.read import open_manifest
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.store.grants import GrantFiles, IssuedGrants
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_publisher_key
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv_node.embedded import embedded_node
from tests.cli.checkpoint import save_checkpoint
from tests.cli.conftest import Cli

TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 6
READERS = [SigningKey(bytes([number]) * 32) for number in range(1, 4)]
DIDS = [encode_did(bytes(reader.verify_key)) for reader in READERS]


@pytest.mark.timeout(60)
def test_a_private_artifact_is_renewed_with_its_grants(
    cli: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, folder = save_checkpoint(tmp_path / "model"), tmp_path / "text", tmp_path / "grants"
    text.write_text(TEXT)
    folder.mkdir()
    monkeypatch.chdir(folder)

    def done(*arguments: object) -> dict[str, Any]:
        ran = cli(*arguments, "--json")
        assert ran.status == 0, ran.err
        return ran.document

    done("keygen")
    key = SigningKey(read_publisher_key(HomeLayout(home).publisher_key))
    done("namespace", "create", "team")
    with embedded_node(home):
        public = done("publish", model, text)["manifest"]
        assert cli("renew", public, "--regrant", "--json").error["code"] == "usage"
        manifest = done("publish", model, text, "--private", "team")["manifest"]
        first = done("grant", manifest, DIDS[0], "--expires", "1d")
        for did in DIDS[1:]:
            done("grant", manifest, did)
        issued = {grant.reader: grant for grant in IssuedGrants(home).of(Cid.parse(manifest))}
        assert issued.keys() == set(DIDS)
        over = replace(issued[DIDS[1]], expires=int(time.time()) - 3600)
        IssuedGrants(home).keep(SignedStatement.sign(over, key))
        assert done("grants", "remove", manifest, "--reader", DIDS[2])["removed"]
        assert not done("grants", "remove", manifest, "--reader", DIDS[2])["removed"]
        listed = done("grants")
        assert [row["reader"] for row in listed["grants"]] == [encode_did(bytes(key.verify_key))]
        assert sorted(row["reader"] for row in listed["issued"]) == sorted(DIDS[:2])

        alone = cli("renew", manifest, "--expires", "30d")
        assert "can open the old manifest alone, 1 of whom are known here" in alone.err
        blocks = done("status")["store"]["blocks"]
        renewed = done("renew", manifest, "--expires", "30d", "--regrant")
        assert done("status")["store"]["blocks"] == blocks + 1, "one envelope is new"
        assert [(row["reader"], row["expires"]) for row in renewed["grants"]] == [(DIDS[0], first["expires"])]
        done("grant", renewed["manifest"], DIDS[2])

    new = Cid.parse(renewed["manifest"])
    own, given = GrantFiles(home).get(new), Path(renewed["grants"][0]["file"])
    theirs = SignedStatement.decode(given.read_bytes()).open(Grant)
    assert (own.manifest, theirs.manifest, given.parent) == (new, new, folder)
    assert theirs.sequence > renewed["sequence"] > renewed["renewed_sequence"]
    assert {grant.reader for grant in IssuedGrants(home).of(new)} == {DIDS[0], DIDS[2]}
    envelope = StoredBlocks(HomeLayout(home).blocks).read(new)
    opened = open_manifest(new, Envelope.decode(envelope).open(), artifact_key=theirs.artifact_key(READERS[0]))
    assert opened.manifest.expires == renewed["expires"]
    assert len(opened.token_ids) == len(TEXT)
    assert theirs.artifact_key(READERS[0]) == own.artifact_key(key)
