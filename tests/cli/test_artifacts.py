"""``inspect`` and ``verify`` over sample artifacts: good ones, and one fault at a time."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from p2pkv.errors import IntegrityError
from p2pkv.formats.dagcbor import decode_map, encode
from p2pkv.formats.envelope import Envelope
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.home import HomeLayout
from tests.cli.artifacts import envelope_file, store
from tests.cli.conftest import Cli
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample, model
from tests.support.cars import data_blocks
from tests.support.stores import cut_off, damage_block, flip_block

NOW = int(time.time())
TOKENS = [number % 500 for number in range(600)]


@pytest.fixture
def sample() -> Sample:
    return make_sample(TOKENS, created=NOW, expires=NOW + 3 * 86_400 + 43_200)


@pytest.fixture
def trusted(cli: Cli) -> None:
    assert cli("trust", "add", PUBLISHER).status == 0


# --- inspect -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trusted")
def test_inspect_shows_what_a_stored_artifact_is(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, sample)
    shown = cli("inspect", sample.cid)
    assert shown.status == 0
    values = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert values["manifest"] == str(sample.cid)
    assert values["model"] == f"tiny (id {'01' * 32})"
    assert values["layers"] == "2 x full attention, KV heads: 1, K: 8, V: 8"
    assert values["tokens"] == "600 tokens in 3 segments, 3 of them here"
    assert values["size"] == "37.5 KiB of KV"
    assert values["expires"].endswith("(in 3 days)")
    assert values["signature"] == "valid"
    assert values["standing"].startswith("usable here")


def test_inspect_reads_an_envelope_file_and_tells_why_it_is_not_usable(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    shown = cli("inspect", envelope_file(tmp_path, sample), "--json")
    assert shown.status == 0
    document = shown.document
    assert document["manifest"] == str(sample.cid)
    assert (document["tokens"], document["segments"], document["segments_stored"]) == (600, 3, 0)
    assert document["kv_bytes"] == 600 * 2 * 16 * 2
    assert document["usable"] is False
    assert [fault["code"] for fault in document["faults"]] == ["trust.untrusted"]
    assert f"p2pkv trust add {PUBLISHER}" in cli("inspect", envelope_file(tmp_path, sample)).out


def test_inspect_keeps_control_characters_off_the_terminal(cli: Cli, tmp_path: Path) -> None:
    sample = make_sample([1, 2], description=model("bad\x1b[2J\nname"), created=NOW)
    assert "bad\ufffd[2J\ufffdname" in cli("inspect", envelope_file(tmp_path, sample)).out


def test_inspect_shows_nothing_under_a_bad_signature(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    envelope = Envelope.decode(sample.blocks[sample.cid])
    path = tmp_path / "forged"
    path.write_bytes(replace(envelope, signature=bytes(64)).encode())
    told = cli("inspect", path, "--json")
    assert (told.status, told.out, told.error["code"]) == (3, "", "integrity.signature")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_nowhere_is_told_so(cli: Cli, command: str, sample: Sample) -> None:
    told = cli(command, sample.cid, "--json")
    assert (told.status, told.error["code"]) == (4, "artifact.not_found")
    assert f"p2pkv fetch {sample.cid}" in told.error["advice"]
    told = cli(command, "no-such-file", "--json")
    assert (told.status, told.error["code"]) == (2, "usage")


# --- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trusted")
def test_a_good_artifact_passes_with_every_block_hashed(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, sample)
    checked = cli("verify", sample.cid, "--json")
    assert (checked.status, checked.err) == (0, "")
    assert checked.document == {
        "manifest": str(sample.cid),
        "ok": True,
        "faults": [],
        "tokens_checked": True,
        "segments": 3,
        "complete_segments": 3,
        "blocks_checked": 9,
        "bytes_checked": 600 * 2 * 16 * 2,
        "missing": 0,
        "repaired": False,
    }
    assert f"all right: {sample.cid}" in cli("verify", sample.cid).out


@pytest.mark.usefixtures("trusted")
def test_an_envelope_file_alone_passes_and_says_that_no_block_was_checked(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    checked = cli("verify", envelope_file(tmp_path, sample))
    assert checked.status == 0
    assert "none stored here, none checked" in checked.out


def _codes(cli: Cli, argument: object) -> tuple[int, list[str]]:
    told = cli("verify", argument, "--json")
    document = told.document
    assert document["ok"] is not bool(document["faults"])
    assert all(fault["advice"] and fault["message"] for fault in document["faults"])
    return told.status, [fault["code"] for fault in document["faults"]]


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("position", [0, 3, 5])
def test_one_flipped_bit_in_a_block_is_found(cli: Cli, home: Path, sample: Sample, position: int) -> None:
    store(home, sample)
    flip_block(home, data_blocks(sample)[position], 8 * 7)
    assert _codes(cli, sample.cid) == (3, ["integrity.hash"])


@pytest.mark.usefixtures("trusted")
def test_verify_changes_nothing_and_the_owner_of_the_store_mends_it(cli: Cli, home: Path, sample: Sample) -> None:
    """A daemon may be running on the home: its packs are its own, and a fetch lets it find the damage and repair it."""
    store(home, sample)
    victim = data_blocks(sample)[3]
    flip_block(home, victim, 8 * 7)
    packs = files_of(HomeLayout(home).blocks)
    for _ in range(2):
        assert _codes(cli, sample.cid) == (3, ["integrity.hash"])
    assert files_of(HomeLayout(home).blocks) == packs
    with closing(BlockPacks(HomeLayout(home).blocks)) as blocks:
        with pytest.raises(IntegrityError):
            blocks.read(victim)
        assert _codes(cli, sample.cid) == (4, ["fetch.incomplete"])
        blocks.write(victim, sample.blocks[victim])
        assert _codes(cli, sample.cid) == (0, [])  # also while the pack is still written to
    assert _codes(cli, sample.cid) == (0, [])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("trusted")
def test_one_flipped_bit_in_a_node_is_found(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, sample)
    flip_block(home, sample.artifact.manifest.segments[1], 8 * 40)
    assert _codes(cli, sample.cid) == (3, ["integrity.hash"])


def test_one_flipped_bit_in_a_stored_envelope_is_found(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, sample)
    flip_block(home, sample.cid, 8 * 100)
    told = cli("verify", sample.cid, "--json")
    assert (told.status, told.error["code"]) == (3, "integrity.hash")


@pytest.mark.usefixtures("trusted")
def test_every_damaged_block_is_told(cli: Cli, home: Path, sample: Sample) -> None:
    first, second, _, _, missing, *_ = data_blocks(sample)
    store(home, sample, without=[missing])
    for cid in (first, second):
        flip_block(home, cid, 0)
    assert _codes(cli, sample.cid) == (3, ["integrity.hash", "integrity.hash", "fetch.incomplete"])


@pytest.mark.usefixtures("trusted")
def test_a_missing_block_makes_it_incomplete(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, sample, without=data_blocks(sample)[2:3])
    assert _codes(cli, sample.cid) == (4, ["fetch.incomplete"])


@pytest.mark.usefixtures("trusted")
def test_a_pack_that_is_cut_off_makes_it_incomplete(cli: Cli, home: Path, tmp_path: Path, sample: Sample) -> None:
    """What lies before the cut is here and right; the envelope lies behind it, and is named as a file."""
    store(home, sample)
    cut_off(home, data_blocks(sample)[4])
    path = envelope_file(tmp_path, sample)
    assert _codes(cli, path) == (4, ["fetch.incomplete"])
    document = cli("verify", path, "--json").document
    assert (document["blocks_checked"], document["complete_segments"]) == (6, 2)
    assert cli("verify", sample.cid, "--json").error["code"] == "artifact.not_found"


@pytest.mark.usefixtures("trusted")
def test_only_the_envelope_of_a_stored_artifact_is_not_enough(cli: Cli, home: Path, sample: Sample) -> None:
    store(home, Sample(sample.artifact, {sample.cid: sample.blocks[sample.cid]}))
    assert _codes(cli, sample.cid) == (4, ["fetch.incomplete"])


def test_nobody_is_trusted_by_default(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    assert _codes(cli, envelope_file(tmp_path, sample)) == (5, ["trust.untrusted"])


@pytest.mark.usefixtures("trusted")
def test_an_expired_artifact_is_refused(cli: Cli, tmp_path: Path) -> None:
    sample = make_sample([1, 2, 3], created=NOW - 90_000, expires=NOW - 3600)
    assert _codes(cli, envelope_file(tmp_path, sample)) == (5, ["trust.expired"])


def test_all_of_several_faults_are_told(cli: Cli, home: Path) -> None:
    sample = make_sample([1, 2, 3], created=NOW - 90_000, expires=NOW - 3600)
    store(home, sample)
    flip_block(home, data_blocks(sample)[0], 0)
    assert _codes(cli, sample.cid) == (3, ["integrity.hash", "trust.untrusted", "trust.expired"])
    told = cli("verify", sample.cid).out
    assert "[trust.expired]" in told
    assert f"not usable: {sample.cid}" in told


@pytest.mark.parametrize("at", [0, 10, 200, -1])
def test_one_flipped_bit_anywhere_in_an_envelope_file_is_refused(cli: Cli, tmp_path: Path, sample: Sample, at: int) -> None:
    path = envelope_file(tmp_path, sample)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    status, (code,) = _codes(cli, path)
    assert status == 3
    assert code.startswith(("format.", "integrity."))


def test_a_cut_off_file_is_refused(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    path = envelope_file(tmp_path, sample)
    path.write_bytes(path.read_bytes()[:-5])
    status, (code,) = _codes(cli, path)
    assert (status, code.split(".")[0]) == (3, "format")


def test_a_newer_version_is_refused_as_one(cli: Cli, tmp_path: Path, sample: Sample) -> None:
    path = envelope_file(tmp_path, sample)
    path.write_bytes(encode({**decode_map(path.read_bytes()), "version": 2}))
    assert _codes(cli, path) == (3, ["format.version"])


def test_a_file_larger_than_any_envelope_is_not_read(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    told = cli("verify", path, "--json")
    assert (told.status, told.error["code"]) == (3, "format.invalid")


@pytest.mark.usefixtures("trusted")
def test_a_block_that_does_not_belong_is_found(cli: Cli, home: Path, sample: Sample) -> None:
    """Another block of equal size under the name of one: what a lying disk could do."""
    store(home, sample)
    first, _, third, *_ = data_blocks(sample)
    damage_block(home, first, sample.blocks[third])
    assert _codes(cli, sample.cid) == (3, ["integrity.hash"])


@pytest.mark.usefixtures("trusted")
def test_a_publisher_who_signs_what_does_not_fit_is_found(cli: Cli, home: Path, sample: Sample) -> None:
    """Every byte has its hash and the signature is good, but two segments are in each other's place."""
    first, second, tail = sample.artifact.manifest.segments
    envelope = Envelope.sign(replace(sample.artifact.manifest, segments=(second, first, tail)), KEY)
    store(home, Sample(sample.artifact, {**sample.blocks, envelope.cid: envelope.encode()}))
    assert _codes(cli, envelope.cid) == (3, ["format.manifest", "format.manifest"])
