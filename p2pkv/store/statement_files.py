"""What publishers said of themselves, on disk: revocations and successions, one file for each publisher.

A file holds the signed statements and is read strictly: each is verified again when it is read, so that nobody who can write
there makes a publisher say anything. A change is made under a lock and replaces the file whole. A file that is damaged is a
StoreError, and nothing of its publisher is used: what it took back is not known any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from p2pkv.errors import FormatError, RemoteError, StoreError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.did import PUBLIC_KEY_BYTES, decode_did, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_NODE_BYTES, MAX_STATEMENT_BYTES, MAX_STATEMENTS
from p2pkv.store.files import os_errors, replace_file
from p2pkv.trust.record import Record, record_from

KIND: Final = "p2pkv/record"
VERSION: Final = 1
_SUFFIX: Final = ".record"
_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * PUBLIC_KEY_BYTES}}}){re.escape(_SUFFIX)}")
_Stamp = tuple[int, int, int]


class StatementFiles(Mapping[str, Record]):
    """The records in ``folder``, by publisher; a missing folder has none. Every method may be called from any thread.

    All methods raise StoreError for a file that is damaged or cannot be read, UnknownVersionError for that of a newer p2pkv.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._read: dict[str, tuple[_Stamp, Record]] = {}

    def __getitem__(self, publisher: str) -> Record:
        """Return what is known of ``publisher``; one look at the file's stamp where it did not change."""
        path = self._path(publisher)
        with self._lock, os_errors(f"read {path}"):
            try:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                    before = self._read.get(publisher)
                    if before is not None and before[0] == stamp:
                        return before[1]
                    data = file.read(MAX_NODE_BYTES + 1)
            except FileNotFoundError:
                self._read.pop(publisher, None)
                raise KeyError(publisher) from None
            record = _parse(path, publisher, data)
            self._read[publisher] = stamp, record
            return record

    def __iter__(self) -> Iterator[str]:
        with os_errors(f"list {self._folder}"):
            names = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        return (encode_did(bytes.fromhex(match[1])) for match in map(_NAME.fullmatch, names) if match)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def publishers(self) -> tuple[str, ...]:
        """Return all publishers of whom something is known."""
        return tuple(self)

    def hear(self, signed: SignedStatement) -> bool:
        """Keep a statement, durably, and return whether it told anything new. Raises as :meth:`Record.heard` does."""
        publisher = signed.publisher
        path = self._path(publisher)
        before = self.get(publisher, Record(publisher))
        if before.heard(signed) is before:
            return False  # most are known, and need no lock
        with os_errors(f"create {self._folder}"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._changing():
            known = self.get(publisher, Record(publisher))
            record = known.heard(signed)
            if record is known:
                return False
            statements: list[dagcbor.Value] = [statement.encode() for statement in record.statements]
            with os_errors(f"write {path}"):
                replace_file(path, dagcbor.encode({"kind": KIND, "version": VERSION, "statements": statements}))
        return True

    def _path(self, publisher: str) -> Path:
        return self._folder / f"{decode_did(publisher).hex()}{_SUFFIX}"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one thread of one process at a time read, change and replace a file."""
        path = self._folder / "lock"
        with os_errors(f"lock {path}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)


def _parse(path: Path, publisher: str, data: bytes) -> Record:
    try:
        fields = Fields(dagcbor.decode_map(data), "record", FormatError)
        fields.version(KIND, VERSION)
        statements: list[SignedStatement] = []
        for item in fields.items("statements", MAX_STATEMENTS):
            if not isinstance(item, bytes) or len(item) > MAX_STATEMENT_BYTES:
                raise FormatError("something in it is no statement")
            statements.append(SignedStatement.decode(item))
        fields.end()
        return record_from(publisher, statements)
    except UnknownVersionError as error:
        raise UnknownVersionError(f"{path}: {error.message}", advice="Upgrade p2pkv.") from None
    except RemoteError as error:  # FormatError, SignatureError
        raise StoreError(
            f"{path} is damaged ({error.message}): what {publisher} took back is not known",
            advice="Nothing of this publisher is used until then: move the file away, and the node looks its list up again.",
        ) from None
