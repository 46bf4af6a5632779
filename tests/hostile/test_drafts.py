"""Attacks with what is carried to the key and back: drafts that say too much, other envelopes, blocks that do not fit.

Whoever signs sees what is signed, and whoever takes a file over believes nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2pkv.artifact.build import Terms
from p2pkv.artifact.signing import check_fits, sign_manifest
from p2pkv.errors import (
    DagCborError,
    FetchIncompleteError,
    FormatError,
    IntegrityError,
    ManifestError,
    P2pkvError,
    SignatureError,
    TruncatedError,
    UnknownVersionError,
    UsageError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import decode_draft, encode_draft
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_NODE_BYTES
from p2pkv.store.car_reading import check_car, read_root
from p2pkv.store.car_signing import write_signed
from tests.hostile.attack import Attack, assert_refused, given
from tests.hostile.nodes import ABSURD, BEYOND, Change, changed, put, without
from tests.support import samples
from tests.support.artifacts import KEY, NOW, PUBLISHER, make_sample
from tests.support.cars import Blocks, blocks_of, car
from tests.support.memory_file import file_in_memory
from tests.support.private import make_private

# --- drafts ----------------------------------------------------------------------------------------------------------------

DRAFT = encode_draft(samples.manifest())
NODE = dagcbor.decode_map(DRAFT)
TERMS: dict[str, Any] = {"publisher": samples.PUBLISHER, "sequence": 7, "created": NOW, "expires": NOW + 60, "licence": "MIT"}
NOTHING: dict[str, Any] = {"publisher": "", "sequence": 0, "created": 0, "expires": None, "licence": ""}
OF_DRAFTS: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{f"{name} in a draft": (put(name, value=value), ManifestError) for name, value in TERMS.items()},
    **{f"{name} in a draft that says nothing": (put(name, value=value), ManifestError) for name, value in NOTHING.items()},
    "all terms": (lambda node: node.update(TERMS), ManifestError),
    **{
        f"the kind of {kind}": (put("kind", value=f"p2pkv/{kind}"), ManifestError)
        for kind in ("manifest", "envelope", "segment", "statement", "drafts")
    },
    **{f"version {version}": (put("version", value=version), UnknownVersionError) for version in (0, 2, 2**63 - 1)},
    "version true": (put("version", value=True), ManifestError),
    **{f"no {name}": (without(name), ManifestError) for name in NODE},
    **{
        f"{path[-1]} of {number}": (put(*path, value=number), ManifestError)
        for path in (("tokens", "count"), ("layers", 0, "kv_heads"))
        for number in ABSURD
    },
    **{f"a later field of {number}": (put("later", value=number), DagCborError) for number in BEYOND},
    "a segment that is the draft": (lambda node: node["segments"].append(Cid.of_node(DRAFT)), ManifestError),
    "a megabyte of a name": (put("model", "name", value="x" * 1_000_000), ManifestError),
    "megabytes of a later field": (put("later", value=bytes(16 * MAX_NODE_BYTES)), DagCborError),
}
MANIFEST = samples.manifest()
OF_ENVELOPES: dict[str, tuple[Envelope, type[P2pkvError]]] = {
    "the envelope of another model": (samples.envelope(replace(MANIFEST, model_name="other")), ManifestError),
    "the envelope of another producer": (samples.envelope(replace(MANIFEST, producer={})), ManifestError),
    "the envelope of more than was drafted": (samples.envelope(replace(MANIFEST, extra={"later": 1})), ManifestError),
    "the envelope of other segments": (
        samples.envelope(replace(MANIFEST, segments=(Cid.of_node(b"\xa0"),))),
        ManifestError,
    ),
    "an envelope that nobody signed": (replace(samples.envelope(), signature=bytes(64)), SignatureError),
    "an envelope of the draft itself": (replace(samples.envelope(), payload=DRAFT), SignatureError),
}

# --- files -----------------------------------------------------------------------------------------------------------------

SAMPLE, OTHER = make_sample(range(600)), make_sample(range(1000, 1600))
BLOCKS = blocks_of(SAMPLE)
PRIVATE = make_private(range(70_000, 70_600))


def with_draft(manifest: Manifest, blocks: Blocks) -> bytes:
    """Return the file of a draft, and of ``blocks`` behind it."""
    root = encode_draft(manifest)
    return car([Cid.of_node(root)], [(Cid.of_node(root), root), *blocks])


def with_block(data: bytes, **fields: Any) -> bytes:
    """Return a file whose first block is ``data``, of which node and draft say what else is in ``fields``."""
    nodes = [Segment.decode(SAMPLE.blocks[cid]) for cid in SAMPLE.artifact.manifest.segments]
    return _with_block(SAMPLE.artifact.manifest, nodes, SAMPLE.blocks, data, fields)


def with_sealed_block(data: bytes, **fields: Any) -> bytes:
    """The same of a private artifact, whose blocks nobody here can open."""
    nodes = [PRIVATE.segment(index) for index in range(3)]
    return _with_block(PRIVATE.manifest, nodes, PRIVATE.blocks, data, fields)


def _with_block(
    manifest: Manifest, nodes: list[Segment], stored: dict[Cid, bytes], data: bytes, fields: dict[str, Any]
) -> bytes:
    (first, *_), *others = nodes[0].layers
    named: BlockRef = replace(first, cid=Cid.of_block(data), **fields)
    nodes = [replace(nodes[0], layers=((named,), *others)), *nodes[1:]]
    written = [node.encode() for node in nodes]
    cids = [Cid.of_node(node) for node in written]
    rest = {ref.cid: stored[ref.cid] for node in nodes for ref in node.blocks() if ref.cid != named.cid}
    blocks = [*zip(cids, written, strict=True), (named.cid, data), *rest.items()]
    return with_draft(replace(manifest, segments=tuple(cids)), blocks)


def private_block() -> bytes:
    return PRIVATE.blocks[PRIVATE.segment(0).layers[0][0].cid]


FIRST = next(SAMPLE.artifact.open_segment(0, SAMPLE.blocks[SAMPLE.artifact.manifest.segments[0]]).blocks())
VALUES = SAMPLE.blocks[FIRST.cid]
MORE, FEWER = VALUES + b"\0", VALUES[:-1]
ENVELOPE = BLOCKS[0]
ROOT = encode_draft(SAMPLE.artifact.manifest)
ROOT_CID = Cid.of_node(ROOT)
FORGED = changed(dagcbor.decode_map(ROOT), lambda node: node.update(TERMS))
FILES: dict[str, tuple[Callable[[], bytes], type[P2pkvError]]] = {
    "a draft with terms": (lambda: car([Cid.of_node(FORGED)], [(Cid.of_node(FORGED), FORGED)]), ManifestError),
    "a manifest without an envelope": (
        lambda: car([Cid.of_node(data := SAMPLE.artifact.manifest.encode())], [(Cid.of_node(data), data)]),
        ManifestError,
    ),
    "a node for a root": (lambda: car([BLOCKS[1][0]], BLOCKS[1:]), ManifestError),
    "a block for a root": (lambda: car([FIRST.cid], [(FIRST.cid, VALUES)]), FormatError),
    "a draft and an envelope as roots": (lambda: car([ROOT_CID, ENVELOPE[0]], [(ROOT_CID, ROOT), *BLOCKS]), FormatError),
    "an envelope behind its draft": (lambda: car([ROOT_CID], [(ROOT_CID, ROOT), *BLOCKS]), FormatError),
    "a draft behind its envelope": (lambda: car([ENVELOPE[0]], [ENVELOPE, (ROOT_CID, ROOT), *BLOCKS[1:]]), FormatError),
    "nodes before the root": (lambda: car([ROOT_CID], [*BLOCKS[1:], (ROOT_CID, ROOT)]), FormatError),
    "no root": (lambda: car([ROOT_CID], BLOCKS[1:]), FormatError),
    "no block": (lambda: with_draft(SAMPLE.artifact.manifest, []), FetchIncompleteError),
    "a block is missing": (lambda: with_draft(SAMPLE.artifact.manifest, BLOCKS[1:-1]), FetchIncompleteError),
    "a node is missing": (
        lambda: with_draft(SAMPLE.artifact.manifest, [part for part in BLOCKS[2:] if part[0] != BLOCKS[-1][0]]),
        FormatError,
    ),
    "the blocks of another text": (lambda: with_draft(SAMPLE.artifact.manifest, blocks_of(OTHER)[1:]), FormatError),
    "the nodes of another text": (
        lambda: with_draft(replace(SAMPLE.artifact.manifest, segments=OTHER.artifact.manifest.segments), blocks_of(OTHER)[1:]),
        ManifestError,
    ),
    "an envelope that nobody signed": (
        lambda: car(
            [Cid.of_node(data := replace(Envelope.decode(ENVELOPE[1]), signature=bytes(64)).encode())],
            [(Cid.of_node(data), data)],
        ),
        SignatureError,
    ),
    "a byte more than its node says": (lambda: with_block(MORE), ManifestError),
    "a byte more, hashed": (lambda: with_block(MORE, digest=digest(MORE)), IntegrityError),
    "a byte less, hashed": (lambda: with_block(FEWER, digest=digest(FEWER)), IntegrityError),
    "a byte more, as its node says": (lambda: with_block(MORE, digest=digest(MORE), size=len(MORE)), ManifestError),
    "a byte less, as its node says": (lambda: with_block(FEWER, digest=digest(FEWER), size=len(FEWER)), ManifestError),
    "no byte": (lambda: with_block(b"", digest=digest(b"")), IntegrityError),
    "as many zeros as a block may have": (
        lambda: with_block(bytes(MAX_CODED_BLOCK_BYTES), digest=digest(bytes(MAX_CODED_BLOCK_BYTES))),
        IntegrityError,
    ),
    "a size of 2^62": (lambda: with_block(VALUES, size=2**62), FormatError),
    "a sealed block of a byte more": (lambda: with_sealed_block(private_block() + b"\0"), IntegrityError),
    "a sealed block of a byte less": (lambda: with_sealed_block(private_block()[:-1]), IntegrityError),
    "a sealed block of no byte": (lambda: with_sealed_block(b""), IntegrityError),
    "a sealed block as large as any": (lambda: with_sealed_block(bytes(MAX_CODED_BLOCK_BYTES)), IntegrityError),
    "values for a sealed block": (lambda: with_sealed_block(PRIVATE.layers[0][0]), IntegrityError),
    "a sealed block whose size is that of its values": (
        lambda: with_sealed_block(PRIVATE.layers[0][0], size=len(PRIVATE.layers[0][0])),
        ManifestError,
    ),
}


def check_file(data: bytes) -> None:
    with file_in_memory(data) as path:
        check_car(path)


ATTACKS = [
    *(
        Attack(f"draft: {name}", decode_draft, error, partial(changed, NODE, change))
        for name, (change, error) in OF_DRAFTS.items()
    ),
    Attack("draft: an envelope", decode_draft, ManifestError, given(samples.envelope().encode())),
    Attack("draft: a manifest", decode_draft, ManifestError, given(MANIFEST.encode())),
    Attack("draft: a byte behind it", decode_draft, DagCborError, given(DRAFT + b"\0")),
    Attack("draft: twice", decode_draft, DagCborError, given(DRAFT * 2)),
    *(Attack(name, partial(check_fits, draft=DRAFT), error, given(found)) for name, (found, error) in OF_ENVELOPES.items()),
    *(Attack(f"file: {name}", check_file, error, make) for name, (make, error) in FILES.items()),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_what_the_attacks_change_is_good() -> None:
    assert encode_draft(decode_draft(changed(NODE, lambda node: None))) == DRAFT
    check_fits(samples.envelope(), DRAFT)
    check_file(car([ENVELOPE[0]], BLOCKS))
    check_file(with_draft(SAMPLE.artifact.manifest, BLOCKS[1:]))
    check_file(with_block(VALUES))
    check_file(with_sealed_block(private_block()))


def test_a_draft_that_is_cut_off_anywhere() -> None:
    for end in range(0, len(DRAFT), 7):
        with pytest.raises(TruncatedError):
            decode_draft(DRAFT[:end])


def test_a_later_sequence_is_asked_for_before_anything_is_signed_again() -> None:
    """Whoever is handed an envelope to sign again cannot be made to sign below what it signed."""
    for sequence in (0, MANIFEST.sequence, -1):
        terms = Terms(PUBLISHER, sequence=sequence, created=NOW)
        assert_refused(Attack("", lambda terms=terms: sign_manifest(MANIFEST, terms, KEY), UsageError))


def test_a_file_is_not_signed_with_the_envelope_of_another(tmp_path: Path) -> None:
    """The target is as it was, also where it is the file itself."""
    file = tmp_path / "draft.car"
    data = with_draft(SAMPLE.artifact.manifest, BLOCKS[1:])
    file.write_bytes(data)
    checked = check_car(file)
    other = Envelope.sign(OTHER.artifact.manifest, KEY)
    for target in (file, tmp_path / "signed.car"):
        assert_refused(Attack("", lambda target=target: write_signed(checked, file, other, target), ManifestError))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == data


def test_a_root_that_is_not_the_first_block_is_not_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "late.car"
    file.write_bytes(car([ROOT_CID], [*BLOCKS[1:], (ROOT_CID, ROOT)]))
    assert_refused(Attack("", lambda: read_root(file), FormatError))
