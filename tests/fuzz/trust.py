"""Targets: what publishers sign beside manifests, and the files of keys and rules."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from p2pkv.artifact import private
from p2pkv.artifact.build import Terms
from p2pkv.artifact.granting import make_grant
from p2pkv.artifact.signing import check_fits, sign_manifest
from p2pkv.errors import (
    FormatError,
    IntegrityError,
    KeyFileError,
    SignatureError,
    StoreError,
    UnknownVersionError,
    WrongReaderError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.draft import decode_draft, encode_draft
from p2pkv.formats.grant import Grant
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.succession import Succession
from p2pkv.store import grants, sequence, statement_files
from p2pkv.store.publisher_key import read_key_file, write_publisher_key
from p2pkv.store.secrets import SEED_BYTES, read_node_key
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.rules import Action, Namespace, Rule
from tests.fuzz.target import Target, hold
from tests.support import samples
from tests.support.memory_file import file_in_memory

_FILE: Final = Path("file")  # is named in errors, and not opened


def statement(data: bytes) -> None:
    decoded = SignedStatement.decode(data)
    hold(decoded.encode(), data)
    decoded.open(Revocations)


def revocations(data: bytes) -> None:
    hold(Revocations.decode(data).encode(), data)


def succession(data: bytes) -> None:
    hold(Succession.decode(data).encode(), data)


def grant(data: bytes) -> None:
    """A grant of a publisher who lies, opened by its reader. That it does not expire may be said, or not."""
    decoded = Grant.decode(data)
    hold(Grant.decode(decoded.encode()), decoded)
    hold(len(decoded.artifact_key(samples.KEY)), private.ARTIFACT_KEY_BYTES)


def grant_file(data: bytes) -> None:
    found = grants._parse(_FILE, data)
    hold(SignedStatement.decode(data).encode(), data)
    hold(Grant.decode(found.encode()), found)


def record(data: bytes) -> None:
    hold(statement_files._parse(_FILE, samples.PUBLISHER, data).publisher, samples.PUBLISHER)


def draft(data: bytes) -> None:
    """What is a draft can be signed, and what was signed is what was drafted."""
    manifest = decode_draft(data)
    hold(encode_draft(manifest), data)
    hold(encode_draft(check_fits(sign_manifest(manifest, _TERMS, samples.KEY), data)), data)


_TERMS: Final = Terms(samples.PUBLISHER, sequence=7, created=samples.CREATED, licence="MIT")
_KEY: Final = bytes(range(32))
_SEALED: Final = private.seal_segment_keys(_KEY, [private.SegmentCipher(_KEY)])


def sealed_segment_keys(data: bytes) -> None:
    """Nobody without the key makes bytes that open: what was sealed is all that does."""
    hold(private.open_segment_keys(_KEY, data, 1), (private.SegmentCipher(_KEY),))
    hold(data, _SEALED)


def trust_file(data: bytes) -> None:
    for rule in TrustFile(_FILE)._parse(data):
        hold(isinstance(rule, Rule), True)


def key_file(data: bytes) -> None:
    """Its form alone: what a passphrase opens costs what it is meant to cost."""
    with file_in_memory(data) as path:
        read_key_file(path)


def node_key(data: bytes) -> None:
    with file_in_memory(data) as path:
        hold(len(read_node_key(path)), SEED_BYTES)


def sequence_file(data: bytes) -> None:
    with file_in_memory(data) as path:
        hold(sequence._read(path, samples.PUBLISHER) >= 0, True)


def _key_file(passphrase: bytes | None) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.key"
        write_publisher_key(path, _KEY, passphrase)
        return path.read_bytes()


def _trust_file() -> bytes:
    with TemporaryDirectory() as folder:
        file = TrustFile(Path(folder) / "trust.json")
        file.add(samples.PUBLISHER, "a friend", samples.CREATED)
        file.add_rule(Rule(Action.REJECT, "*", samples.MODEL_ID, "CC0-1.0", Namespace.PUBLIC, "none of this"))
        return (Path(folder) / "trust.json").read_bytes()


def _revocations(*what: Revoked) -> Revocations:
    return Revocations(publisher=samples.PUBLISHER, sequence=1, created=samples.CREATED, items=what)


_LISTS: Final = (
    _revocations(
        Revoked(Scope.MANIFEST, samples.envelope().cid, "a mistake"),
        Revoked(Scope.MODEL, samples.MODEL_ID, ""),
        Revoked(Scope.BEFORE, 7, "older ones"),
    ),
    _revocations(Revoked(Scope.BEFORE, EVERYTHING, "stolen")),
)
_SUCCESSION: Final = Succession.agreed(
    samples.PUBLISHER, samples.OTHER_KEY, last=9, created=samples.CREATED, reason="a new machine"
)
_STATEMENTS: Final = tuple(SignedStatement.sign(each, samples.KEY).encode() for each in (*_LISTS, _SUCCESSION))
_RECORD: Final = dagcbor.encode(
    {"kind": statement_files.KIND, "version": statement_files.VERSION, "statements": [_STATEMENTS[0], _STATEMENTS[2]]}
)
_GRANT: Final = make_grant(
    samples.KEY,
    samples.envelope().cid,
    _KEY,
    samples.MODEL_ID,
    samples.TOKEN_IDS,
    sequence=1,
    created=samples.CREATED,
    ephemeral=bytes(range(1, 33)),
)
_SIGNED: Final = (FormatError, SignatureError)

TARGETS: Final = (
    Target("statement", statement, _STATEMENTS, _SIGNED),
    Target("revocations", revocations, tuple(each.encode() for each in _LISTS), _SIGNED),
    Target("succession", succession, (_SUCCESSION.encode(),), _SIGNED),
    Target("grant", grant, (_GRANT.encode(),), (FormatError, IntegrityError, WrongReaderError)),
    Target("grant-file", grant_file, (SignedStatement.sign(_GRANT, samples.KEY).encode(),), (StoreError,)),
    Target("record", record, (_RECORD,), (StoreError, UnknownVersionError)),
    Target("draft", draft, (encode_draft(samples.manifest()),)),
    Target("segment-keys", sealed_segment_keys, (_SEALED,), (IntegrityError,)),
    Target("trust-file", trust_file, (_trust_file(),), (StoreError, UnknownVersionError)),
    Target("key-file", key_file, (_key_file(None), _key_file(b"open")), (KeyFileError, UnknownVersionError)),
    Target("node-key", node_key, (b"p2pkv node key v1\n" + b"00" * SEED_BYTES + b"\n",), (KeyFileError, UnknownVersionError)),
    Target(
        "sequence-file",
        sequence_file,
        (f"p2pkv sequence v1\n{samples.PUBLISHER}\n7\n".encode(),),
        (KeyFileError, UnknownVersionError),
    ),
)
