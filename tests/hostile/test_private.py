"""Attacks on private artifacts: sealed bytes in another place, under another key or changed, and what a liar seals himself.

The publisher signs whatever the attack needs, so that sealing is all that stands in its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_ABYTES as TAG_BYTES,
    crypto_aead_xchacha20poly1305_ietf_NPUBBYTES as NONCE_BYTES,
)

from p2pkv.artifact.private import SegmentCipher, seal_segment_keys, seal_tokens
from p2pkv.artifact.read import open_manifest
from p2pkv.errors import GrantMissingError, IntegrityError, ManifestError, P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.sealing import SEAL_BYTES, seal
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import Part
from p2pkv.keys import chain, encode_tokens
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from tests.hostile.attack import Attack, assert_refused, given
from tests.hostile.nodes import flipped
from tests.support.artifacts import make_sample, model
from tests.support.private import ARTIFACT_KEY, NAMESPACE, PrivateSample, make_private

# Two whole segments and a tail, of two layers each.
TOKENS = range(70_000, 70_600)
SAMPLE = make_private(TOKENS)
READ = SAMPLE.open(ARTIFACT_KEY)
PLACES = [(index, layer) for index in range(3) for layer in range(2)]
OTHERS = {
    "another text": make_private(range(80_000, 80_600)),
    "another namespace": make_private(TOKENS, namespace=bytes(32)),
    "other values": make_private(TOKENS, seed=1),
}
OTHER_ARTIFACT = make_private(TOKENS, artifact_key=bytes(32))


def block_of(place: tuple[int, int], sample: PrivateSample = SAMPLE) -> bytes:
    index, layer = place
    return sample.blocks[sample.segment(index).layers[layer][0].cid]


def open_in(data: bytes, place: tuple[int, int] = (0, 0)) -> bytes:
    """Open what is named as the block of a place, with its true size, as a reader with the key does."""
    index, layer = place
    ref = replace(SAMPLE.segment(index).layers[layer][0], cid=Cid.of_block(data), size=len(data))
    return bytes(READ.decode_block(index, layer, ref, memoryview(data)))


SEALED, OTHER_BLOCK = block_of((0, 0)), block_of((0, 1))
PLAIN = SAMPLE.layers[0][0]
CIPHER = READ.ciphers[0]
PART = SAMPLE.segment(0).layers[0][0].part
END_OF_TEXT = 8 * (len(SEALED) - TAG_BYTES)


def sealed_as(
    cipher: SegmentCipher = CIPHER, layer: int = 0, codec: str = "raw", content: bytes = PLAIN, **part: Any
) -> bytes:
    return cipher.seal(layer, replace(PART, **part), codec, content)


OF_BLOCKS: dict[str, bytes] = {
    **{f"bit {position} of the nonce changed": flipped(SEALED, position) for position in (0, 95, 8 * NONCE_BYTES - 1)},
    **{
        f"bit {position} of the ciphertext changed": flipped(SEALED, position)
        for position in (8 * NONCE_BYTES, END_OF_TEXT // 2, END_OF_TEXT - 1)
    },
    **{f"bit {position} of the tag changed": flipped(SEALED, END_OF_TEXT + position) for position in (0, 64, 127)},
    "the nonce of another block": OTHER_BLOCK[:NONCE_BYTES] + SEALED[NONCE_BYTES:],
    "the ciphertext of another block": SEALED[:NONCE_BYTES] + OTHER_BLOCK[NONCE_BYTES:-TAG_BYTES] + SEALED[-TAG_BYTES:],
    "the tag of another block": SEALED[:-TAG_BYTES] + OTHER_BLOCK[-TAG_BYTES:],
    **{f"the tag cut to {TAG_BYTES - cut} bytes": SEALED[:-cut] for cut in (1, 8, TAG_BYTES)},
    "a tag of zeros": SEALED[:-TAG_BYTES] + bytes(TAG_BYTES),
    "a byte behind it": SEALED + b"\0",
    "twice": SEALED * 2,
    **{f"its first {size} bytes": SEALED[:size] for size in (0, 1, NONCE_BYTES, SEAL_BYTES - 1, SEAL_BYTES)},
    "its first byte missing": SEALED[1:],
    "zeros": bytes(len(SEALED)),
    "as many zeros as a block may have": bytes(MAX_CODED_BLOCK_BYTES),
    "the values as they are": PLAIN,
    "the values and zeros": PLAIN + bytes(SEAL_BYTES),
    "sealed with the artifact key": sealed_as(SegmentCipher(ARTIFACT_KEY)),
    "sealed with the namespace": sealed_as(SegmentCipher(NAMESPACE)),
    "sealed with a key of zeros": sealed_as(SegmentCipher(bytes(32))),
    "sealed with the key of another segment": sealed_as(READ.ciphers[1]),
    "sealed with the key of another namespace": sealed_as(OTHERS["another namespace"].open(ARTIFACT_KEY).ciphers[0]),
    "sealed for another layer": sealed_as(layer=1),
    "sealed for layer 2^32": sealed_as(layer=2**32),
    "sealed for another codec": sealed_as(codec="byteplane"),
    "sealed as K alone": sealed_as(part=Part.K),
    "sealed for other heads": sealed_as(head_start=1, head_end=2),
    "sealed for another size": sealed_as(size=PART.size + 1),
    "sealed with the label of token ids": seal(CIPHER.key, b"p2pkv/tokens/v1", PLAIN),
    "sealed without a label": seal(CIPHER.key, b"", PLAIN),
    "a byte too few, sealed rightly": sealed_as(content=PLAIN[:-1]),
    "a byte too many, sealed rightly": sealed_as(content=PLAIN + b"\0"),
    "no byte, sealed rightly": sealed_as(content=b""),
    "other values, sealed rightly": sealed_as(content=OTHERS["other values"].layers[0][0]),
    **{f"the block of {name}": block_of((0, 0), sample) for name, sample in OTHERS.items()},
}


def open_manifest_with(changes: dict[str, Any]) -> None:
    """Decode and open the manifest as a reader with the key does."""
    manifest = Manifest.decode(replace(SAMPLE.manifest, **changes).encode())
    open_manifest(SAMPLE.cid, manifest, artifact_key=ARTIFACT_KEY)


TOKEN_BYTES = encode_tokens(TOKENS)
OTHER_TOKENS = OTHERS["another text"].manifest.tokens
KEYS_LABEL = b"p2pkv/segment-keys/v1"


def tokens(**changes: Any) -> dict[str, Any]:
    return {"tokens": replace(SAMPLE.manifest.tokens, **changes)}


def segment_keys(sealed: bytes) -> dict[str, Any]:
    return {"segment_keys": sealed}


OF_MANIFESTS: dict[str, tuple[dict[str, Any], type[P2pkvError]]] = {
    "the token ids of another artifact": (tokens(inline=OTHER_ARTIFACT.manifest.tokens.inline), IntegrityError),
    "the token ids of another text under the same key": (tokens(inline=OTHER_TOKENS.inline), ManifestError),
    "the digest of another text": (tokens(digest=OTHER_TOKENS.digest), ManifestError),
    "token ids that nobody sealed": (tokens(inline=TOKEN_BYTES + bytes(SEAL_BYTES)), IntegrityError),
    "token ids without a seal": (tokens(inline=TOKEN_BYTES), ManifestError),
    "a token id too few": (tokens(inline=seal_tokens(ARTIFACT_KEY, TOKEN_BYTES[:-4])), ManifestError),
    "the segment keys as token ids": (
        tokens(inline=seal(ARTIFACT_KEY, KEYS_LABEL, TOKEN_BYTES)),
        IntegrityError,
    ),
    "the segment keys of another artifact": (segment_keys(OTHER_ARTIFACT.manifest.segment_keys or b""), IntegrityError),
    "the segment keys of another text": (segment_keys(OTHERS["another text"].manifest.segment_keys or b""), ManifestError),
    "the segment keys of another namespace": (
        segment_keys(OTHERS["another namespace"].manifest.segment_keys or b""),
        ManifestError,
    ),
    "segment keys in another order": (segment_keys(seal_segment_keys(ARTIFACT_KEY, READ.ciphers[::-1])), ManifestError),
    "a segment key too few": (segment_keys(seal_segment_keys(ARTIFACT_KEY, READ.ciphers[1:])), ManifestError),
    "a segment key too many": (segment_keys(seal_segment_keys(ARTIFACT_KEY, READ.ciphers * 2)), ManifestError),
    "token ids as segment keys": (segment_keys(seal_tokens(ARTIFACT_KEY, bytes(3 * 32))), IntegrityError),
    "segment keys that nobody sealed": (segment_keys(bytes(3 * 32 + SEAL_BYTES)), IntegrityError),
    "segment keys of no byte": (segment_keys(b""), ManifestError),
    "segment keys of a megabyte": (segment_keys(bytes(1_000_000)), ManifestError),
    "the last chain key of the text": (
        {"last_chain_key": chain(model().model_id, TOKENS, namespace=NAMESPACE).last},
        ManifestError,
    ),
    "keys of other engines": ({"aliases": {"vllm": b"\x01"}}, ManifestError),
}


def open_node(changes: Callable[[Segment], Segment], *, key: bytes | None) -> None:
    """Open the last node, changed, in its place, with the artifact's key or without."""
    nodes = [SAMPLE.segment(index) for index in range(3)]
    forged = SAMPLE.with_segments([*nodes[:2], changes(nodes[2])])
    forged.open(key).open_segment(2, forged.blocks[forged.manifest.segments[2]])


def ref(**fields: Any) -> Callable[[Segment], Segment]:
    def change(segment: Segment) -> Segment:
        (first, *_), *others = segment.layers
        return replace(segment, layers=((replace(first, **fields),), *others))

    return change


LAST = SAMPLE.segment(2)
OF_NODES: dict[str, Callable[[Segment], Segment]] = {
    "the chain key of the text": lambda node: replace(node, chain_key=chain(model().model_id, TOKENS).last),
    "the chain key of another segment": lambda node: replace(node, chain_key=READ.ciphers[0].chain_key),
    "the chain key of another text": lambda node: replace(node, chain_key=OTHERS["another text"].segment(2).chain_key),
    "the node of another segment": lambda node: SAMPLE.segment(1),
    "another codec": lambda node: replace(node, codec="byteplane"),
    "the size without the seal": ref(size=LAST.layers[0][0].part.size),
    "a byte more than its size": ref(size=LAST.layers[0][0].size + 1),
    "as large as a block may be": ref(size=MAX_CODED_BLOCK_BYTES),
}

SWAPS = {f"the block of {one} in the place of {other}": (block_of(one), other) for one, other in permutations(PLACES, 2)}
ATTACKS = [
    *(Attack(name, partial(open_in, place=place), IntegrityError, given(data)) for name, (data, place) in SWAPS.items()),
    *(Attack(name, open_in, IntegrityError, given(data)) for name, data in OF_BLOCKS.items()),
    *(Attack(name, open_manifest_with, error, given(changes)) for name, (changes, error) in OF_MANIFESTS.items()),
    *(
        Attack(f"{name}, {who} the key", partial(open_node, changes, key=key), ManifestError)
        for name, changes in OF_NODES.items()
        for who, key in (("with", ARTIFACT_KEY), ("without", None))
    ),
    Attack("opened with another key", lambda: SAMPLE.open(bytes(32)), IntegrityError),
    Attack("opened with the namespace", lambda: SAMPLE.open(NAMESPACE), IntegrityError),
    Attack(
        "a public artifact that is said to be private",
        lambda: Manifest.decode(replace(make_sample(TOKENS).artifact.manifest, segment_keys=bytes(3 * 32 + 40)).encode()),
        ManifestError,
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_what_the_attacks_change_is_good() -> None:
    for index, layer in PLACES:
        assert open_in(block_of((index, layer)), (index, layer)) == SAMPLE.layers[index][layer]
    assert sealed_as() == SEALED
    open_manifest_with({})
    open_manifest_with(tokens(inline=seal_tokens(ARTIFACT_KEY, TOKEN_BYTES)))
    for key in (ARTIFACT_KEY, None):
        open_node(lambda node: node, key=key)


def test_whoever_lacks_the_key_opens_no_block_and_is_told_what_is_missing() -> None:
    closed = SAMPLE.open()
    for index, layer in PLACES:
        found = SAMPLE.segment(index).layers[layer][0]
        data = memoryview(SAMPLE.blocks[found.cid])
        run = partial(closed.decode_block, index, layer, found, data)
        assert_refused(Attack("", run, GrantMissingError))
