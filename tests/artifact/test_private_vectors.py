"""What p2pkv builds of the tiny artifact in a namespace is, byte by byte, what the second implementation makes."""

from __future__ import annotations

from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.granting import make_grant
from p2pkv.artifact.private import Privacy, SegmentCipher, open_segment_keys, open_tokens
from p2pkv.artifact.read import open_manifest
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.grant import Grant, seal_key
from p2pkv.formats.segment import Segment
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import chain, encode_tokens
from tests.support import samples, vectors

DOCUMENT = vectors.document("private.json")
VECTORS = vectors.load("private.json")
PRIVACY = Privacy(bytes.fromhex(DOCUMENT["namespace"]), bytes.fromhex(DOCUMENT["artifact_key"]))
READER = SigningKey(bytes.fromhex(VECTORS["sealed key"].fields["reader_seed"]))


def test_the_artifact_is_built_as_the_vectors_show() -> None:
    written: dict[Cid, bytes] = {}
    description = ModelDescription(samples.MODEL_ID, "tiny", samples.LAYERS, samples.DTYPE)
    builder = ArtifactBuilder(
        description, samples.TOKEN_IDS, lambda cid, data: written.__setitem__(cid, bytes(data)), privacy=PRIVACY
    )
    segment = builder.add_segment(samples.BLOCKS)
    manifest = builder.finish(Terms(samples.PUBLISHER, sequence=1, created=samples.CREATED), {})
    assert segment.encode() == VECTORS["segment"].data
    assert manifest.encode() == VECTORS["manifest"].data
    assert Envelope.sign(manifest, samples.KEY).encode() == VECTORS["envelope"].data
    assert written[segment.layers[0][0].cid] == VECTORS["block"].data


def test_the_vectors_open() -> None:
    envelope = VECTORS["envelope"].data
    manifest = Envelope.decode(envelope).open()
    artifact = open_manifest(Cid.of_node(envelope), manifest, artifact_key=PRIVACY.artifact_key)
    assert list(artifact.token_ids) == samples.TOKEN_IDS
    segment = Segment.decode(VECTORS["segment"].data)
    block = artifact.decode_block(0, 0, segment.layers[0][0], memoryview(VECTORS["block"].data))
    assert bytes(block) == samples.BLOCKS[0]
    assert open_tokens(PRIVACY.artifact_key, VECTORS["tokens"].data) == encode_tokens(samples.TOKEN_IDS)
    assert open_segment_keys(PRIVACY.artifact_key, VECTORS["segment keys"].data, 1) == artifact.ciphers


def test_the_segment_key_follows_from_namespace_and_chain_key() -> None:
    key = chain(samples.MODEL_ID, samples.TOKEN_IDS, namespace=PRIVACY.namespace).last
    assert SegmentCipher.derive(PRIVACY.namespace, key).key.hex() == VECTORS["segment key"].fields["digest"]
    assert key in VECTORS["segment key"].data


def test_the_grant_is_made_and_opened_as_the_vectors_show() -> None:
    ephemeral = bytes.fromhex(VECTORS["sealed key"].fields["ephemeral"])
    reader = encode_did(bytes(READER.verify_key))
    assert seal_key(PRIVACY.artifact_key, reader, ephemeral) == VECTORS["sealed key"].data
    grant = SignedStatement.decode(VECTORS["signed grant"].data).open(Grant)
    assert grant.artifact_key(READER) == PRIVACY.artifact_key
    assert grant.encode() == VECTORS["grant"].data
    assert grant.manifest == Cid.of_node(VECTORS["envelope"].data)
    own = make_grant(
        samples.KEY,
        grant.manifest,
        PRIVACY.artifact_key,
        samples.MODEL_ID,
        samples.TOKEN_IDS,
        sequence=1,
        created=samples.CREATED,
        ephemeral=ephemeral,
    )
    assert (own.match, own.token_count, own.reader) == (grant.match, grant.token_count, samples.PUBLISHER)
