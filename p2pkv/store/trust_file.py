"""The list of trusted publishers, one JSON file that people may read and edit; CLI and daemon both change it.

A change is made under a lock of its own beside the file and replaces it whole, so readers need no lock. A daemon sees what
the CLI changed at its next look.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from p2pkv.errors import FormatError, StoreError, UsageError
from p2pkv.formats.did import decode_did
from p2pkv.limits import MAX_TRUST_FILE_BYTES, MAX_TRUST_NOTE_BYTES
from p2pkv.store.files import os_errors, replace_file
from p2pkv.store.versioned_json import read_list

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class TrustedPublisher:
    """A publisher (``did:key:z6Mk...``), what its friend wrote about it, and since when (seconds since the epoch)."""

    did: str
    note: str
    added: int


class TrustFile:
    """The trusted publishers in ``path``; a missing file means nobody. Every method may be called from any thread.

    All methods raise StoreError for a damaged file and UnknownVersionError for that of a newer p2pkv.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._publishers: dict[str, TrustedPublisher] = {}

    def list(self) -> tuple[TrustedPublisher, ...]:
        """Return all trusted publishers in the order they were added."""
        return tuple(self._current().values())

    def trusts(self, did: str) -> bool:
        """Return whether ``did`` is on the list; one look at the file's stamp where it did not change."""
        return did in self._current()

    def add(self, did: str, note: str, now: int) -> bool:
        """Trust ``did`` and return whether that is new; the note is replaced either way.

        Raises FormatError for a name that is no ``did:key``, UsageError for a note of more than MAX_TRUST_NOTE_BYTES.
        """
        decode_did(did)
        if len(note.encode()) > MAX_TRUST_NOTE_BYTES:
            raise UsageError(f"a note of more than {MAX_TRUST_NOTE_BYTES} bytes", advice="Say it shorter.")
        with self._changing():
            publishers = dict(self._current())
            before = publishers.get(did)
            publishers[did] = TrustedPublisher(did, note, before.added if before else now)
            self._replace(publishers)
        return before is None

    def remove(self, did: str) -> bool:
        """Stop trusting ``did`` and return whether it was trusted."""
        with self._changing():
            publishers = dict(self._current())
            if publishers.pop(did, None) is None:
                return False
            self._replace(publishers)
        return True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one thread of one process at a time read, change and replace the file."""
        path = self._path.with_name(f"{self._path.name}.lock")
        with os_errors(f"lock {path}"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def _current(self) -> dict[str, TrustedPublisher]:
        with self._lock, os_errors(f"read {self._path}"):
            try:
                with self._path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                    if stamp != self._stamp:
                        if found.st_size > MAX_TRUST_FILE_BYTES:
                            raise self._damaged(f"is larger than {MAX_TRUST_FILE_BYTES} bytes")
                        self._publishers = self._parse(file.read(MAX_TRUST_FILE_BYTES))
                        self._stamp = stamp
            except FileNotFoundError:
                self._stamp, self._publishers = None, {}
            return self._publishers

    def _replace(self, publishers: dict[str, TrustedPublisher]) -> None:
        document = {"version": VERSION, "publishers": [asdict(publisher) for publisher in publishers.values()]}
        data = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
        if len(data) > MAX_TRUST_FILE_BYTES:
            raise UsageError(f"{self._path} would exceed {MAX_TRUST_FILE_BYTES} bytes", advice="Remove some publishers first.")
        with os_errors(f"write {self._path}"):
            replace_file(self._path, data)

    def _parse(self, data: bytes) -> dict[str, TrustedPublisher]:
        items = read_list(self._path, data, "publishers", VERSION, self._damaged)
        return {publisher.did: publisher for publisher in map(self._publisher, items)}

    def _publisher(self, item: object) -> TrustedPublisher:
        match item:
            case {"did": str(did), "note": str(note), "added": int(added), **rest} if not rest:
                try:
                    decode_did(did)
                except FormatError as error:
                    raise self._damaged(f"names a publisher that is none ({error.message})") from None
                return TrustedPublisher(did, note, added)
        raise self._damaged("has an entry without exactly did, note and added")

    def _damaged(self, complaint: str) -> StoreError:
        return StoreError(
            f"{self._path} {complaint}",
            advice="Nobody is trusted until it is mended: correct it, or move it away and run `p2pkv trust add` again.",
        )
