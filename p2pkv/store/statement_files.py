"""What publishers said of themselves, on disk: revocations and successions, one file each, and when they were asked.

A file holds the signed statements and is read strictly: each is verified again when it is read, so that nobody who can write
there makes a publisher say anything. A change is made under a lock and replaces the file whole. A file that is damaged is a
StoreError, and nothing of its publisher is used: what it took back is not known any more.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from p2pkv.errors import FormatError, RemoteError, StoreError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.did import PUBLIC_KEY_BYTES, decode_did, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_FOLLOWED_PUBLISHERS, MAX_NODE_BYTES, MAX_STATEMENT_BYTES, MAX_STATEMENTS
from p2pkv.store.files import locked, make_private_folder, os_errors, replace_file
from p2pkv.store.versioned_json import read_list
from p2pkv.trust.record import Record, record_from

KIND: Final = "p2pkv/record"
VERSION: Final = 1
_SUFFIX: Final = ".record"
_ANSWERS: Final = "answers.json"
_NO_DATE: Final = 253_402_300_800  # seconds since the epoch of the year 10000, which no calendar shows
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
            make_private_folder(self._folder)
        with locked(self._folder / "lock"):
            known = self.get(publisher, Record(publisher))
            record = known.heard(signed)
            if record is known:
                return False
            statements: list[dagcbor.Value] = [statement.encode() for statement in record.statements]
            with os_errors(f"write {path}"):
                replace_file(path, dagcbor.encode({"kind": KIND, "version": VERSION, "statements": statements}))
        return True

    def note_answers(self, answers: Mapping[str, float]) -> None:
        """Keep when publishers were looked up and somebody answered last, in seconds since the epoch.

        Of more than MAX_FOLLOWED_PUBLISHERS the latest are kept. Raises DiskFullError too.
        """
        with os_errors(f"create {self._folder}"):
            make_private_folder(self._folder)
        with locked(self._folder / "lock"):
            known = {**self._answers(), **{publisher: int(at) for publisher, at in answers.items()}}
            latest = sorted(known.items(), key=lambda item: item[1], reverse=True)[:MAX_FOLLOWED_PUBLISHERS]
            rows = [{"publisher": publisher, "at": at} for publisher, at in latest]
            path = self._folder / _ANSWERS
            with os_errors(f"write {path}"):
                replace_file(path, json.dumps({"version": 1, "answers": rows}, indent=1).encode())

    def heard(self, publisher: str) -> float | None:
        """Return when this home last heard what ``publisher`` says, in seconds since the epoch; ``None`` for never.

        That is the last look-up that somebody answered, or when the last statement was kept.
        """
        times: list[float] = [self._answers().get(publisher, 0)]
        path = self._path(publisher)
        with os_errors(f"look at {path}"), suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
        return max(times) or None

    def _answers(self) -> dict[str, int]:
        """Return when each publisher was looked up with an answer. A damaged file is as good as none: it decides nothing."""
        path = self._folder / _ANSWERS

        def damaged(complaint: str) -> StoreError:
            return StoreError(f"{path} {complaint}")

        with os_errors(f"read {path}"):
            try:
                with path.open("rb") as file:
                    data = file.read(MAX_NODE_BYTES)
            except FileNotFoundError:
                return {}
        found: dict[str, int] = {}
        with suppress(StoreError, UnknownVersionError):
            for row in read_list(path, data, "answers", 1, damaged):
                match row:
                    case {"publisher": str(publisher), "at": int(at)} if 0 <= at < _NO_DATE:
                        found[publisher] = at
        return found

    def _path(self, publisher: str) -> Path:
        return self._folder / f"{decode_did(publisher).hex()}{_SUFFIX}"


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
