"""From a draft to a shared artifact: build, sign, join, publish, renew, announce; and everything that must not be signed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey

from p2pkv.formats.car import encode_section, section_size
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.draft import encode_draft
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.sealing import SEAL_BYTES
from p2pkv.store.car_reading import read_root
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import write_publisher_key
from p2pkv.store.sequence import sequence_file
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv_node.embedded import embedded_node
from tests.cli.checkpoint import save_checkpoint
from tests.cli.conftest import Cli, Ran
from tests.cli.terminal import command, on_a_terminal
from tests.support.artifacts import KEY, Sample, make_sample
from tests.support.cars import LONG, car, in_order, whole

NOW = int(time.time())
SEED = bytes(range(100, 132))
DID = encode_did(bytes(SigningKey(SEED).verify_key))
TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 6


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample([number % 500 for number in range(600)], created=NOW)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


@pytest.fixture
def key(home: Path) -> Path:
    path = HomeLayout(home).publisher_key
    write_publisher_key(path, SEED)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


def draft_file(folder: Path, sample: Sample) -> Path:
    path = folder / "book.draft"
    path.write_bytes(encode_draft(sample.artifact.manifest))
    return path


def unsigned_car(folder: Path, sample: Sample) -> Path:
    """Return a CAR file of ``sample`` as if nobody had signed it."""
    draft = encode_draft(sample.artifact.manifest)
    cid = Cid.of_node(draft)
    path = folder / "book.car"
    path.write_bytes(car([cid], [(cid, draft), *((part, sample.blocks[part]) for part in in_order(sample)[1:])]))
    return path


def done(ran: Ran) -> dict[str, Any]:
    assert ran.status == 0, ran.err
    return ran.document


def refused(ran: Ran) -> tuple[int, str]:
    assert ran.out == ""
    code: str = ran.error["code"]
    return ran.status, code


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Assert that the block changes no file in ``folder``."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# --- sign --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["short", "long"])
def test_a_car_file_is_signed_whole(cli: Cli, key: Path, folder: Path, sample: Sample, which: str) -> None:
    artifact = sample if which == "short" else LONG
    source, target = unsigned_car(folder, artifact), folder / "signed.car"
    signed = done(cli("sign", source, "--out", target, "--licence", "CC0-1.0", "--expires", "30d", "--yes", "--json"))
    envelope = Envelope.decode(read_root(target))
    manifest = envelope.open()
    assert signed == {
        "manifest": str(envelope.cid),
        "file": str(target),
        "publisher": DID,
        "sequence": manifest.sequence,
        "expires": manifest.expires,
        "licence": "CC0-1.0",
    }
    assert (manifest.publisher, manifest.licence) == (DID, "CC0-1.0")
    assert encode_draft(manifest) == encode_draft(artifact.artifact.manifest)
    blocks = [(cid, artifact.blocks[cid]) for cid in in_order(artifact)[1:]]
    assert target.read_bytes() == car([envelope.cid], [(envelope.cid, envelope.encode()), *blocks])
    assert sorted(os.listdir(folder)) == ["book.car", "signed.car"]


def test_a_draft_alone_is_signed_and_joined_to_the_same_file(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    source, envelope, target = unsigned_car(folder, sample), folder / "book.envelope", folder / "joined.car"
    signed = done(cli("sign", draft_file(folder, sample), "--out", envelope, "--yes", "--json"))
    assert Cid.of_node(envelope.read_bytes()) == Cid.parse(signed["manifest"])
    joined = done(cli("join", source, envelope, "--out", target, "--json"))
    assert joined == {
        "manifest": signed["manifest"],
        "file": str(target),
        "publisher": DID,
        "bytes": target.stat().st_size,
    }
    assert read_root(target) == envelope.read_bytes()
    assert cli("trust", "add", DID).status == 0
    assert done(cli("verify", target, "--json"))["complete_segments"] == 3


def test_a_file_may_be_signed_in_its_place(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    path = unsigned_car(folder, sample)
    manifest = done(cli("sign", path, "--out", path, "--yes", "--json"))["manifest"]
    assert str(Cid.of_node(read_root(path))) == manifest
    assert os.listdir(folder) == [path.name]


def test_what_is_signed_is_shown_before(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    shown = cli("sign", draft_file(folder, sample), "--out", folder / "out", "--licence", "my\x1b[2Jterms", "--yes")
    assert shown.status == 0
    lines = shown.err.splitlines()
    assert "tokens    600 tokens in 3 segments" in lines
    assert "licence   my\ufffd[2Jterms" in lines
    assert f"to be signed by {DID}" in lines
    assert [line.split()[0] for line in shown.out.splitlines()] == ["manifest", "publisher", "file"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nothing_is_signed_where_nobody_can_be_asked(
    cli: Cli, key: Path, folder: Path, sample: Sample, options: list[str]
) -> None:
    path = draft_file(folder, sample)
    with unchanged(folder):
        asked = cli("sign", path, "--out", folder / "out", *options)
    assert asked.status == 2
    assert "--yes" in asked.err
    assert not sequence_file(key).exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the child of the fork runs another program at once
def test_who_signs_is_asked_on_the_terminal(home: Path, key: Path, folder: Path, sample: Sample) -> None:
    question, out = r"Sign it\? \[y/N\]: $", folder / "out"
    arguments = command("sign", draft_file(folder, sample), "--out", out)
    for answer in (b"n", b""):
        status, screen = on_a_terminal(arguments, home, [(question, answer)])
        assert (status, out.exists(), sequence_file(key).exists()) == (2, False, False), screen
        assert "600 tokens in 3 segments" in screen
    status, screen = on_a_terminal(arguments, home, [(question, b"y")])
    assert status == 0, screen
    assert Envelope.decode(out.read_bytes()).open().publisher == DID


def test_a_private_artifact_is_not_signed_offline(cli: Cli, key: Path, folder: Path) -> None:
    """Its grants name the manifest: under another one it could be opened by nobody."""
    sample = make_sample([1, 2, 3], created=NOW, key=SigningKey(SEED))
    manifest = sample.artifact.manifest
    inline = bytes(12 + SEAL_BYTES)
    private = replace(manifest, tokens=replace(manifest.tokens, inline=inline), segment_keys=bytes(32 + SEAL_BYTES))
    path = folder / "private"
    for data in (Envelope.sign(private, SigningKey(SEED)).encode(), encode_draft(private)):
        path.write_bytes(data)
        with unchanged(folder):
            told = cli("sign", path, "--out", folder / "out", "--yes", "--json")
            assert refused(told) == (2, "usage")
            assert "nobody would have a grant" in told.error["message"]


def test_sequence_numbers_grow_and_signing_again_keeps_the_licence(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    path, envelope = draft_file(folder, sample), folder / "envelope"
    first = done(cli("sign", path, "--out", envelope, "--licence", "CC0-1.0", "--yes", "--json"))
    second = done(cli("sign", path, "--out", folder / "other", "--yes", "--json"))
    again = done(cli("sign", envelope, "--out", envelope, "--expires", "1d", "--yes", "--json"))
    assert first["sequence"] < second["sequence"] < again["sequence"]
    assert (second["licence"], again["licence"]) == ("", "CC0-1.0")
    assert sequence_file(key).read_text().splitlines() == ["p2pkv sequence v1", DID, str(again["sequence"])]


def test_only_its_publisher_signs_again(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    path = folder / "envelope"
    path.write_bytes(sample.blocks[sample.cid])
    with unchanged(folder):
        assert refused(cli("sign", path, "--out", folder / "out", "--yes", "--json")) == (2, "usage")


def test_a_lost_sequence_file_does_not_sign_below_what_was_signed(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    """The clock was far ahead once, and its numbers are forgotten here."""
    envelope = Envelope.sign(replace(sample.artifact.manifest, publisher=DID, sequence=1 << 60), SigningKey(SEED))
    path = folder / "envelope"
    path.write_bytes(envelope.encode())
    with unchanged(folder):
        assert refused(cli("sign", path, "--out", folder / "out", "--yes", "--json")) == (2, "usage")


def test_a_car_file_with_anything_wrong_is_not_signed(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    path = unsigned_car(folder, sample)
    good, last = path.read_bytes(), section_size(len(sample.blocks[in_order(sample)[-1]]))
    flipped = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
    for data, wanted in (
        (flipped, (3, "integrity.hash")),
        (good[:-1], (3, "format.truncated")),
        (good[:-last], (4, "fetch.incomplete")),
        (good + encode_section(Cid.of_block(b"x"), b"x"), (3, "format.invalid")),
    ):
        path.write_bytes(data)
        with unchanged(folder):
            assert refused(cli("sign", path, "--out", folder / "out", "--yes", "--json")) == wanted
    assert not sequence_file(key).exists()


# --- join --------------------------------------------------------------------------------------------------------------


def test_another_artifacts_envelope_is_not_joined(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    source, envelope = unsigned_car(folder, sample), folder / "envelope"
    other = make_sample([number % 499 for number in range(600)], created=NOW)
    done(cli("sign", draft_file(folder, other), "--out", envelope, "--yes", "--json"))
    with unchanged(folder):
        assert refused(cli("join", source, envelope, "--out", folder / "out", "--json")) == (3, "format.manifest")
        assert refused(cli("join", source, folder / "book.draft", "--out", folder / "out", "--json")) == (3, "format.manifest")
        assert refused(cli("join", folder / "none", envelope, "--out", folder / "out", "--json")) == (2, "usage")
        assert refused(cli("join", source, folder / "none", "--out", folder / "out", "--json")) == (2, "usage")


def test_a_forged_envelope_is_not_joined(cli: Cli, folder: Path, sample: Sample) -> None:
    source, path = unsigned_car(folder, sample), folder / "envelope"
    path.write_bytes(replace(Envelope.decode(sample.blocks[sample.cid]), signature=bytes(64)).encode())
    with unchanged(folder):
        assert refused(cli("join", source, path, "--out", folder / "out", "--json")) == (3, "integrity.signature")


# --- looking at files --------------------------------------------------------------------------------------------------


def test_an_unsigned_file_is_shown_as_that_and_not_usable(cli: Cli, folder: Path, sample: Sample) -> None:
    for path in (unsigned_car(folder, sample), draft_file(folder, sample)):
        document = done(cli("inspect", path, "--json"))
        assert (document["signature"], document["usable"], document["manifest"]) == ("none", False, None)
        assert (document["publisher"], document["sequence"], document["created"]) == (None, None, None)
        assert (document["tokens"], document["segments"]) == (600, 3)
        assert [fault["code"] for fault in document["faults"]] == ["integrity.signature"]
        shown = cli("inspect", path).out
        assert "signature  none yet" in shown
        assert "p2pkv sign" in shown
        assert "did:key" not in shown
        verdict = cli("verify", path, "--json")
        assert (verdict.status, verdict.document["ok"]) == (3, False)
        assert [fault["code"] for fault in verdict.document["faults"]] == ["integrity.signature"]


def test_a_signed_file_is_verified_without_home_or_node(cli: Cli, home: Path, folder: Path, sample: Sample) -> None:
    path = folder / "signed.car"
    path.write_bytes(whole(sample))
    checked = cli("verify", path, "--json")
    assert (checked.status, [fault["code"] for fault in checked.document["faults"]]) == (5, ["trust.untrusted"])
    assert checked.document["blocks_checked"] == len(sample.blocks) - 1
    assert checked.document["bytes_checked"] == 600 * 2 * 16 * 2
    assert checked.document["complete_segments"] == 3
    assert done(cli("inspect", path, "--json"))["manifest"] == str(sample.cid)
    assert not home.exists()


def test_a_block_of_another_size_than_its_node_says_is_found(cli: Cli, key: Path, folder: Path, sample: Sample) -> None:
    """Every byte has its hash and the publisher signed it: only who needs the block can see that it does not do."""
    manifest = sample.artifact.manifest
    segment = sample.artifact.open_segment(0, sample.blocks[manifest.segments[0]])
    short = sample.blocks[segment.layers[0][0].cid][:-1]
    lie = replace(segment.layers[0][0], cid=Cid.of_block(short), digest=Cid.of_block(short).digest)
    node = replace(segment, layers=((lie,), *segment.layers[1:])).encode()
    signed = Envelope.sign(replace(manifest, segments=(Cid.of_node(node), *manifest.segments[1:])), KEY)
    blocks = {Cid.of_node(node): node, Cid.of_block(short): short, **sample.blocks, signed.cid: signed.encode()}
    order = [signed.cid, *signed.open().segments, lie.cid, *in_order(sample)[4:]]
    path = folder / "signed.car"
    path.write_bytes(car([signed.cid], [(cid, blocks[cid]) for cid in order if cid != segment.layers[0][0].cid]))
    assert cli("verify", path, "--json").document["faults"][0]["code"] == "integrity.hash"


@pytest.mark.parametrize("part", range(0, 100, 9))
def test_one_flipped_bit_anywhere_in_a_car_file_is_found(cli: Cli, folder: Path, sample: Sample, part: int) -> None:
    data = bytearray(whole(sample))
    data[len(data) * part // 100] ^= 1
    path = folder / "signed.car"
    path.write_bytes(data)
    ran = cli("verify", path, "--json")
    assert ran.status in (2, 3)  # a file that does not begin as a CAR is none
    code = ran.error["code"] if ran.out == "" else ran.document["faults"][0]["code"]
    assert code.startswith(("format.", "integrity."))


# --- publish, renew, announce ------------------------------------------------------------------------------------------


def test_from_the_machine_with_the_model_to_the_network(
    cli: Cli, home: Path, folder: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    """Three machines: one has the model, one the key, one the node; what each knows is files."""
    key, signature = tmp_path / "safe" / "me.key", folder / "book.envelope"
    built, signed, draft = folder / "book.car", folder / "signed.car", folder / "book.draft"
    made = done(cli("build", model, text, "--out", built, "--draft", draft, "--name", "tiny", "--json"))
    assert (made["tokens"], made["file"], made["draft_file"]) == (len(TEXT), str(built), str(draft))
    assert sorted(os.listdir(folder)) == ["book.car", "book.draft"]
    assert not home.exists(), "building needs no home"
    assert made["draft"] == str(Cid.of_node(draft.read_bytes()))
    assert read_root(built) == draft.read_bytes()

    did = done(cli("keygen", "--out", key, "--json"))["did"]
    manifest = done(cli("sign", draft, "--key", key, "--out", signature, "--licence", "CC0-1.0", "--yes", "--json"))[
        "manifest"
    ]
    assert done(cli("join", built, signature, "--out", signed, "--json"))["manifest"] == manifest

    with embedded_node(home):
        assert refused(cli("publish", built, "--json")) == (3, "integrity.signature")
        assert refused(cli("import", built, "--json")) == (3, "integrity.signature")
        assert refused(cli("publish", signed, "--json")) == (5, "trust.untrusted")
        assert refused(cli("publish", signed, "--licence", "MIT", "--json")) == (2, "usage")
        assert refused(cli("publish", model, "--json")) == (2, "usage")
        assert refused(cli("announce", manifest, "--json")) == (4, "artifact.not_found")
        published = done(cli("publish", signed, "--trust", "--json"))
        assert (published["manifest"], published["publisher"], published["trusted"]) == (manifest, did, True)
        announced = done(cli("announce", manifest, "--json"))
        assert announced == {"manifest": manifest, "keys": announced["keys"]}
        assert announced["keys"] > 1
        status = done(cli("status", "--json"))
        assert [row["manifest_cid"] for row in status["artifacts"]] == [manifest]

        renewed = done(cli("renew", manifest, "--expires", "30d", "--key", key, "--json"))
        assert renewed["renews"] == manifest
        assert renewed["sequence"] > renewed["renewed_sequence"]
        shown = done(cli("inspect", renewed["manifest"], "--json"))
        assert (shown["sequence"], shown["expires"], shown["licence"]) == (renewed["sequence"], renewed["expires"], "CC0-1.0")
        assert (shown["segments_stored"], shown["usable"]) == (shown["segments"], True)
        assert done(cli("status", "--json"))["store"]["blocks"] == status["store"]["blocks"] + 1, "one envelope is new"
        assert refused(cli("renew", manifest, "--json")) == (2, "key.unreadable")
        cli("keygen")
        assert refused(cli("renew", manifest, "--json")) == (2, "usage")
        straight = done(cli("publish", model, text, "--name", "tiny", "--json"))["manifest"]
        envelope = Envelope.decode(StoredBlocks(HomeLayout(home).blocks).read(Cid.parse(straight)))
        assert encode_draft(envelope.open()) == draft.read_bytes(), "building and publishing make the same blocks"
        assert refused(cli("renew", str(Cid.of_node(b"nobody")), "--key", key, "--json")) == (4, "artifact.not_found")


def test_a_build_that_fails_leaves_nothing(cli: Cli, folder: Path, model: Path, text: Path, tmp_path: Path) -> None:
    assert refused(cli("build", tmp_path / "none", text, "--out", folder / "x.car", "--json"))[0] == 2
    assert refused(cli("build", model, text, "--out", folder, "--json")) == (2, "usage")
    assert refused(cli("build", model, text, "--out", folder / "no" / "x.car", "--json")) == (4, "store.io")
    assert os.listdir(folder) == []


def test_what_a_killed_build_left_is_removed_by_the_next(cli: Cli, folder: Path, text: Path, tmp_path: Path) -> None:
    left, others, alive = folder / ".x.car.1.building", folder / ".y.car.1.building", folder / ".x.car.2.building"
    for path in (left, others, alive):
        path.mkdir()
        (path / "00000001.pack").write_bytes(b"something")
    lock = os.open(alive, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refused(cli("build", tmp_path / "none", text, "--out", folder / "x.car", "--json"))[0] == 2
    finally:
        os.close(lock)
    assert sorted(os.listdir(folder)) == [alive.name, others.name]
