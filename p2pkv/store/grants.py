"""The grants of a home: what its reader may open, and what its publisher granted to readers. Each is a file that holds the
signed statement as it was given.

Files are readable by their owner alone, though what is secret in them is sealed to the reader. A grant is verified when it is
added, and believed from then on, as everything in the home of one's own account is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2pkv.errors import GrantMissingError, P2pkvError, StoreError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_STATEMENT_BYTES
from p2pkv.store.files import locked, make_private_folder, os_errors, read_up_to, replace_file
from p2pkv.store.home import HomeLayout

SUFFIX: Final = ".grant"


class GrantFiles:
    """What the reader of ``home`` may open, by artifact; a missing folder has none.

    Every method may be called from any thread.
    """

    def __init__(self, home: Path) -> None:
        self._folder = HomeLayout(home).grants

    def add(self, data: bytes) -> Grant:
        """Keep a signed grant, durably, in place of an older one of the same artifact.

        Raises UsageError where the one that is here is newer, SignatureError, FormatError, DiskFullError, StoreError.
        """
        grant = SignedStatement.decode(data).open(Grant)
        path = self._path(grant.manifest)
        with os_errors(f"make {self._folder}"):
            make_private_folder(self._folder)
        with locked(self._folder, os.O_RDONLY):
            before = _read(path)
            # Another publisher's is no successor; which of the two is the artifact's own shows when its manifest is here.
            if before is not None and before.publisher == grant.publisher and before.sequence > grant.sequence:
                raise UsageError(f"a newer grant of {grant.manifest} is here already", advice="Remove it first to go back.")
            _write(path, data)
        return grant

    def get(self, manifest: Cid) -> Grant:
        """Return the grant of an artifact. Raises GrantMissingError, StoreError where it is damaged."""
        found = _read(self._path(manifest))
        if found is None:
            raise GrantMissingError(f"there is no grant of {manifest} here")
        return found

    def remove(self, manifest: Cid) -> bool:
        """Take a grant away; return whether there was one. Raises StoreError."""
        return _remove(self._path(manifest))

    def __iter__(self) -> Iterator[Cid]:
        """Yield the artifacts that there are grants of. Raises StoreError."""
        for name in _names(self._folder):
            try:
                yield Cid.parse(name.removesuffix(SUFFIX))
            except P2pkvError:
                continue  # what others put there, or was being written when the power went

    def _path(self, manifest: Cid) -> Path:
        return self._folder / f"{manifest}{SUFFIX}"


class IssuedGrants:
    """What the publisher of ``home`` granted to readers, by artifact and reader: who is granted a renewed artifact again.

    Every method may be called from any thread, and raises StoreError.
    """

    def __init__(self, home: Path) -> None:
        self._folder = HomeLayout(home).issued_grants

    def keep(self, signed: SignedStatement) -> None:
        """Keep a grant that was made here, in place of an older one. Raises DiskFullError too."""
        grant = signed.open(Grant)
        _write(self._path(grant.manifest, grant.reader), signed.encode())

    def of(self, manifest: Cid) -> list[Grant]:
        """Return the last grant of an artifact to each reader; one that is damaged is a StoreError."""
        found = (_read(self._folder / name) for name in _names(self._folder) if name.startswith(f"{manifest}."))
        return [grant for grant in found if grant is not None]

    def every(self) -> list[Grant]:
        """Return the last grant of every artifact to each reader."""
        found = (_read(self._folder / name) for name in _names(self._folder))
        return [grant for grant in found if grant is not None]

    def forget(self, manifest: Cid, reader: str) -> bool:
        """Forget that ``reader`` (a did:key) was granted an artifact, and return whether that was known.

        Raises FormatError for what is no did:key.
        """
        return _remove(self._path(manifest, reader))

    def _path(self, manifest: Cid, reader: str) -> Path:
        # In hexadecimal: some file systems take two did:key for one, whose letters differ in their case alone.
        return self._folder / f"{manifest}.{decode_did(reader).hex()}{SUFFIX}"


def _names(folder: Path) -> list[str]:
    with os_errors(f"list {folder}"):
        names = os.listdir(folder) if folder.is_dir() else []
    return sorted(name for name in names if name.endswith(SUFFIX))


def _write(path: Path, data: bytes) -> None:
    with os_errors(f"write {path}"):
        make_private_folder(path.parent)
        replace_file(path, data)


def _read(path: Path) -> Grant | None:
    """Return the grant in a file, ``None`` where there is none. Raises StoreError where it is damaged."""
    with os_errors(f"read {path}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            data = read_up_to(descriptor, MAX_STATEMENT_BYTES + 1)
        finally:
            os.close(descriptor)
    return _parse(path, data)


def _parse(path: Path, data: bytes) -> Grant:
    """Return the grant in ``data``, what ``path`` holds. Raises StoreError where it is damaged."""
    try:
        return Grant.decode(SignedStatement.decode(data).payload)
    except P2pkvError as error:
        raise StoreError(f"{path} is damaged: {error.message}", advice="Remove the file and add the grant again.") from None


def _remove(path: Path) -> bool:
    with os_errors(f"remove {path}"):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
    return True
