"""Targets: the formats, alone and as an artifact is opened with them."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Final

from p2pkv import keys
from p2pkv.artifact.read import decode_block, open_artifact, open_manifest
from p2pkv.codecs import codec_named
from p2pkv.errors import CidError, DagCborError, FormatError, IntegrityError, P2pkvError, SignatureError, TruncatedError
from p2pkv.formats import dagcbor
from p2pkv.formats.car import CarDecoder, encode_header, encode_section
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did, encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import Segment
from tests.fuzz.target import Target, hold
from tests.support import samples, vectors

# What is shorter is fed byte by byte, what is longer in three pieces: a decoder that is not done looks at it all again.
BYTE_BY_BYTE: Final = 16
_ARTIFACT: Final = open_artifact(samples.envelope().cid, samples.envelope().encode())
_BLOCK: Final = samples.segment().layers[0][0]


def seeds_of(file: str) -> tuple[bytes, ...]:
    """Return all bytes of the golden vectors in ``file``, also those that have to be refused."""
    content = vectors.document(file)
    good = [vector.data for vector in vectors.load(file).values()]
    return (*good, *(bytes.fromhex(entry["hex"]) for entry in content.get("refused", ()) if "hex" in entry))


def pieces(data: bytes) -> list[bytes]:
    """Return ``data`` in cuts that a stream may bring: byte by byte, or in three at places that follow from all of it.

    So each place is a cut in some of many inputs, and an input ends the same way each time.
    """
    if len(data) <= BYTE_BY_BYTE:
        return [data[at : at + 1] for at in range(len(data))]
    chance = zlib.crc32(data)
    one, two = sorted((chance % len(data), (chance >> 16) % len(data)))
    return [data[:one], data[one:two], data[two:]]


def text_of(data: bytes) -> str:
    """Return any bytes as text, with lone surrogates where they are not UTF-8, as Python takes texts from outside."""
    return data.decode("utf-8", errors="surrogateescape")


def cid_bytes(data: bytes) -> None:
    hold(Cid.from_bytes(data).binary, data)


def cid_text(data: bytes) -> None:
    text = text_of(data)
    hold(str(Cid.parse(text)), text)


def did(data: bytes) -> None:
    text = text_of(data)
    hold(encode_did(decode_did(text)), text)


def dag_cbor(data: bytes) -> None:
    hold(dagcbor.encode(dagcbor.decode(data)), data)


def envelope(data: bytes) -> None:
    decoded = Envelope.decode(data)
    hold(decoded.encode(), data)
    decoded.open()


def manifest(data: bytes) -> None:
    decoded = Manifest.decode(data)
    written = decoded.encode()
    if written != data:  # an optional field may be absent or null, which is the one freedom that a manifest has
        hold(Manifest.decode(written), decoded)


def segment(data: bytes) -> None:
    hold(Segment.decode(data).encode(), data)


def artifact(data: bytes) -> None:
    """A manifest that is signed, since its publisher lies, and its token ids."""
    decoded = Manifest.decode(data)
    opened = open_manifest(_ARTIFACT.cid, decoded)
    hold(len(opened.token_ids), 0 if decoded.private else decoded.tokens.count)


def segment_in_place(data: bytes) -> None:
    """A node whose hash the publisher signed: what it says of its place and its blocks is all that can be wrong."""
    signed = replace(_ARTIFACT.manifest, segments=(Cid.of_node(data),))
    node = replace(_ARTIFACT, manifest=signed).open_segment(0, data)
    hold([len(layer) for layer in node.layers], [1] * len(samples.LAYERS))


def car(data: bytes) -> None:
    """In pieces it has to end as it does whole, with the same blocks or the same error."""
    decoder = CarDecoder()
    blocks: list[tuple[Cid, bytes]] = []
    refusal: P2pkvError | None = None
    try:
        for piece in pieces(data):
            blocks += decoder.feed(piece)
        decoder.end()
    except P2pkvError as error:
        refusal = error
    whole = CarDecoder()
    try:
        found = whole.feed(data)
        whole.end()
    except P2pkvError as error:
        hold((type(error), error.message), (type(refusal), refusal.message if refusal else ""))
        raise
    hold((blocks, refusal), (found, None))
    hold(encode_header(whole.roots) + b"".join(encode_section(cid, content) for cid, content in found), data)


def tokens(data: bytes) -> None:
    hold(keys.encode_tokens(keys.decode_tokens(data)), data)


def block(data: bytes) -> None:
    """One byte too few or too many is a lie about the size; the name of the codec is the publisher's too."""
    name, _, content = data.partition(b"\0")
    codec = codec_named(text_of(name))
    hold(bytes(decode_block(_BLOCK, codec.name, memoryview(content))), content)


_CIDS: Final = seeds_of("cid.json")
_CIDS_TEXT: Final = tuple(vector.fields["text"].encode() for vector in vectors.load("cid.json").values())
_NODES: Final = seeds_of("segment.json")
_TOKENS: Final = keys.encode_tokens(samples.TOKEN_IDS)

TARGETS: Final = (
    Target("cid", cid_bytes, _CIDS, (CidError,)),
    Target("cid-text", cid_text, _CIDS_TEXT, (CidError,)),
    Target("did", did, (samples.PUBLISHER.encode(), samples.OTHER_PUBLISHER.encode())),
    Target("dag-cbor", dag_cbor, (*seeds_of("dag-cbor.json"), *_NODES), (DagCborError, TruncatedError)),
    Target("envelope", envelope, seeds_of("envelope.json"), (FormatError, SignatureError)),
    Target("manifest", manifest, seeds_of("manifest.json")),
    Target("segment", segment, _NODES),
    Target("artifact", artifact, seeds_of("manifest.json")),
    Target("segment-in-place", segment_in_place, _NODES),
    Target("car", car, seeds_of("car.json"), (FormatError, IntegrityError)),
    Target("tokens", tokens, (_TOKENS, _TOKENS * 3)),
    Target("block", block, tuple(b"raw\0" + content for content in samples.BLOCKS), (FormatError, IntegrityError)),
)
