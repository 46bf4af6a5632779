"""What a program loads that was granted a private artifact, what it asks for it, and what it keeps to itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.granting import Granted, grant_to, granted_again, make_grant
from p2pkv.artifact.private import Privacy
from p2pkv.client.granted import renew_own_grant
from p2pkv.client.sync import Client
from p2pkv.connectors.hf import api as hf
from p2pkv.errors import GrantError, GrantMissingError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.succession import Succession
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import Cost, write_publisher_key
from p2pkv.store.statement_files import StatementFiles
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.artifacts import KEY, PUBLISHER
from tests.support.llama import cache_bytes
from tests.support.private import ARTIFACT_KEY, NAMESPACE, PrivateSample

READER = SigningKey(bytes(range(50, 82)))
CHEAP = Cost(1, 8192)


@pytest.fixture(scope="session")
def private(model: LlamaForCausalLM, document: list[int]) -> PrivateSample:
    """The document, sealed."""
    blocks: dict[Cid, bytes] = {}
    shape = hf.geometry(model)
    description = ModelDescription(hf.model_id_of(model), "tiny", shape.layers, shape.dtype)
    privacy = Privacy(NAMESPACE, ARTIFACT_KEY)
    builder = ArtifactBuilder(description, document, lambda cid, data: blocks.__setitem__(cid, bytes(data)), privacy=privacy)
    cache = hf.open_cache(model)

    def add(start: int, end: int) -> None:
        builder.add_segment([hf.extract_layer(cache, layer, start, end) for layer in range(len(shape.layers))])

    hf.prefill(model, document, cache, hf.canonical_steps(len(document)), on_step=add)
    now = int(time.time())
    envelope = Envelope.sign(builder.finish(Terms(PUBLISHER, now, now), {}), KEY)
    return PrivateSample(envelope.open(), envelope, {**blocks, envelope.cid: envelope.encode()}, privacy, tuple(document), ())


def grant_of(private: PrivateSample, expires: int | None = None) -> Grant:
    own = make_grant(
        KEY,
        private.cid,
        ARTIFACT_KEY,
        private.manifest.model_id,
        private.token_ids,
        sequence=1,
        created=0,
        ephemeral=bytes(range(32)),
    )
    did = encode_did(bytes(READER.verify_key))
    return grant_to(Granted(own, ARTIFACT_KEY), did, sequence=1, created=0, expires=expires, ephemeral=bytes(range(1, 33)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def daemon(home: Path) -> Iterator[ScriptedDaemon]:
    found = ScriptedDaemon(home)
    with closing(found.blocks), found.running():
        yield found


def as_sealed(private: PrivateSample) -> Sealed:
    return private.open(), {**private.blocks, private.cid: private.envelope.encode()}


def script(daemon: ScriptedDaemon, private: PrivateSample, *indices: int) -> None:
    daemon.hold(as_sealed(private)[1])
    daemon.scripts.append([matched(private.open()), *segments(as_sealed(private), *indices), REPORT])


def make_reader(home: Path, grant: Grant, key: SigningKey = READER) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, bytes(key))
    GrantFiles(home).add(SignedStatement.sign(grant, KEY).encode())


def test_a_granted_prompt_names_the_manifest_and_tells_no_tokens(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    prompt: list[int],
    expected: bytes,
) -> None:
    make_reader(home, grant_of(private))
    script(daemon, private, 0, 1, 2)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED, patience_s=3)
    assert daemon.asked == [{"manifest": str(private.cid), "patience_s": 3, "segments": 3, "impatient": True}]
    assert (prefill.report.hit_tokens, prefill.report.miss) == (SHARED, None)
    assert cache_bytes(prefill.cache) == expected
    told = daemon.told[0]
    assert not {"token_ids", "manifest"} & told.keys()


def test_without_the_grant_the_same_events_give_nothing(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    prompt: list[int],
    expected: bytes,
) -> None:
    script(daemon, private, 0, 1, 2)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert cache_bytes(prefill.cache) == expected


@pytest.mark.parametrize("last", range(3))
def test_of_grants_of_one_text_the_one_that_was_made_last_is_asked_for(
    daemon: ScriptedDaemon, home: Path, model: LlamaForCausalLM, private: PrivateSample, prompt: list[int], last: int
) -> None:
    """An artifact that was renewed: the old manifest may have expired."""
    old = grant_of(private)
    write_publisher_key(HomeLayout(home).publisher_key, bytes(READER))
    signed = [Cid.of_node(bytes([number])) for number in range(3)]
    for number, cid in enumerate(signed):
        again = granted_again(old, cid, sequence=2 if number == last else 1, created=0)
        GrantFiles(home).add(SignedStatement.sign(again, KEY).encode())
    daemon.scripts.append([REPORT])
    with Client(home) as client:
        client.prefill(model, prompt, shared=SHARED)
    assert [body["manifest"] for body in daemon.asked] == [str(signed[last])]


Spoil = Callable[[Path, PrivateSample], None]


def expired(home: Path, private: PrivateSample) -> None:
    make_reader(home, grant_of(private, expires=1))


def no_key(home: Path, private: PrivateSample) -> None:
    GrantFiles(home).add(SignedStatement.sign(grant_of(private), KEY).encode())


def locked_key(home: Path, private: PrivateSample) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, bytes(READER), b"secret", CHEAP)
    no_key(home, private)


def damaged(home: Path, private: PrivateSample) -> None:
    make_reader(home, grant_of(private))
    (path,) = HomeLayout(home).grants.iterdir()
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(expired, "grant.expired"), (no_key, "key.unreadable"), (locked_key, "key.unreadable"), (damaged, "store.io")],
)
def test_a_prompt_that_may_be_private_is_computed_and_nothing_is_asked(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    prompt: list[int],
    expected: bytes,
    spoil: Spoil,
    code: str,
) -> None:
    spoil(home, private)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert daemon.asked == []
    assert code in (prefill.report.miss or "")
    assert cache_bytes(prefill.cache) == expected


def test_a_key_under_a_passphrase_is_given(
    daemon: ScriptedDaemon, home: Path, model: LlamaForCausalLM, private: PrivateSample, prompt: list[int]
) -> None:
    locked_key(home, private)
    script(daemon, private, 0, 1, 2)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED, reader=READER)
    assert prefill.report.hit_tokens == SHARED


@pytest.mark.parametrize(("length", "more", "shared"), [(256, [], None), (255, [], None), (100, [], None), (100, [1, 2], 100)])
def test_a_prompt_that_is_no_more_than_the_first_segment_is_not_looked_up(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    document: list[int],
    length: int,
    more: list[int],
    shared: int | None,
) -> None:
    make_reader(home, grant_of(private))
    with Client(home) as client:
        prefill = client.prefill(model, [*document[:length], *more], shared=shared)
    assert daemon.asked == []
    assert "no whole segment" in (prefill.report.miss or "")


def test_another_prompt_is_looked_up_as_ever(
    daemon: ScriptedDaemon, home: Path, model: LlamaForCausalLM, private: PrivateSample, prompt: list[int]
) -> None:
    make_reader(home, grant_of(private))
    daemon.scripts.append([REPORT])
    with Client(home) as client:
        client.prefill(model, [prompt[0] ^ 1, *prompt[1:]])
    assert [body["token_ids"][1] for body in daemon.asked] == [prompt[1]]


def test_a_grant_that_another_gave_is_of_no_use(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    prompt: list[int],
    expected: bytes,
) -> None:
    other = SigningKey(bytes([9]) * 32)
    forged = replace(grant_of(private), publisher=encode_did(bytes(other.verify_key)))
    write_publisher_key(HomeLayout(home).publisher_key, bytes(READER))
    GrantFiles(home).add(SignedStatement.sign(forged, other).encode())
    script(daemon, private, 0, 1, 2)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert "grant.invalid" in (prefill.report.miss or "")
    assert cache_bytes(prefill.cache) == expected


def test_a_grant_by_the_key_that_follows_the_publishers(
    daemon: ScriptedDaemon, home: Path, model: LlamaForCausalLM, private: PrivateSample, prompt: list[int]
) -> None:
    new = SigningKey(bytes([9]) * 32)
    new_did = encode_did(bytes(new.verify_key))
    write_publisher_key(HomeLayout(home).publisher_key, bytes(READER))
    GrantFiles(home).add(SignedStatement.sign(replace(grant_of(private), publisher=new_did), new).encode())
    followed = Succession.agreed(PUBLISHER, new, last=2**40, created=0, reason="")
    StatementFiles(HomeLayout(home).statements).hear(SignedStatement.sign(followed, KEY))
    script(daemon, private, 0, 1, 2)
    with Client(home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == SHARED


def exchanged(private: PrivateSample, one: tuple[int, int], other: tuple[int, int]) -> PrivateSample:
    """Return the artifact with two blocks exchanged; a place is (segment, layer)."""
    rows = [private.segment(index) for index in range(3)]
    a, b = rows[one[0]].layers[one[1]][0], rows[other[0]].layers[other[1]][0]
    for (index, layer), new in (
        (one, replace(a, cid=b.cid, digest=b.digest)),
        (other, replace(b, cid=a.cid, digest=a.digest)),
    ):
        layers = list(rows[index].layers)
        layers[layer] = (new,)
        rows[index] = replace(rows[index], layers=tuple(layers))
    return private.with_segments(rows)


def test_exchanged_blocks_shorten_the_hit_before_a_value_is_used(
    daemon: ScriptedDaemon,
    home: Path,
    model: LlamaForCausalLM,
    private: PrivateSample,
    prompt: list[int],
    expected: bytes,
) -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    write_publisher_key(HomeLayout(home).publisher_key, bytes(READER))
    with Client(home) as client:
        for one, other in combinations(places, 2):
            forged = exchanged(private, one, other)
            GrantFiles(home).add(SignedStatement.sign(replace(grant_of(forged), manifest=forged.cid), KEY).encode())
            for _ in range(2):  # a damaged block is asked for again, once
                script(daemon, forged, 0, 1, 2)
            prefill = client.prefill(model, prompt, shared=SHARED)
            assert prefill.report.hit_tokens == 256 * min(one[0], other[0])
            assert cache_bytes(prefill.cache) == expected
            GrantFiles(home).remove(forged.cid)
            daemon.scripts.clear()


def test_a_quorum_of_what_was_granted_is_refused_and_nothing_is_asked(
    daemon: ScriptedDaemon, home: Path, model: LlamaForCausalLM, private: PrivateSample, prompt: list[int]
) -> None:
    """Its digests are keyed; and asking for others who published it would tell that it is there."""
    make_reader(home, grant_of(private))
    with Client(home) as client, pytest.raises(UsageError, match="is private") as caught:
        client.prefill(model, prompt, shared=SHARED, verify="quorum=2")
    assert "verify=sample" in caught.value.advice
    assert daemon.asked == []


def test_nobody_but_the_publisher_renews_its_grant(home: Path, private: PrivateSample) -> None:
    """A reader's grant, and one by somebody else to the publisher, are not what the publisher grants from."""
    new = Cid.of_node(b"renewed")
    with pytest.raises(GrantMissingError):
        renew_own_grant(home, private.cid, new, KEY, sequence=2, created=0)
    other = SigningKey(bytes([9]) * 32)
    theirs = replace(grant_of(private), publisher=encode_did(bytes(other.verify_key)), reader=PUBLISHER)
    for grant, signer in ((grant_of(private), KEY), (theirs, other)):
        GrantFiles(home).remove(private.cid)
        GrantFiles(home).add(SignedStatement.sign(grant, signer).encode())
        with pytest.raises(GrantError, match="not the one that its publisher keeps"):
            renew_own_grant(home, private.cid, new, KEY, sequence=2, created=0)
    assert list(GrantFiles(home)) == [private.cid]
