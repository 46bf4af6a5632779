"""The grants of a home: one file for each private artifact, which holds the signed statement as it was given.

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
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_STATEMENT_BYTES
from p2pkv.store.files import os_errors, read_up_to, replace_file
from p2pkv.store.home import HomeLayout

SUFFIX: Final = ".grant"


class GrantFiles:
    """The grants under ``home``; a missing folder has none. Every method may be called from any thread."""

    def __init__(self, home: Path) -> None:
        self._folder = HomeLayout(home).grants

    def add(self, data: bytes) -> Grant:
        """Keep a signed grant, durably, in place of an older one of the same artifact.

        Raises UsageError where the one that is here is newer, SignatureError, FormatError, DiskFullError, StoreError.
        """
        grant = SignedStatement.decode(data).open(Grant)
        try:
            before = self.get(grant.manifest)
        except GrantMissingError:
            before = None
        # Another publisher's is no successor; which of the two is the artifact's own shows when its manifest is here.
        if before is not None and before.publisher == grant.publisher and before.sequence > grant.sequence:
            raise UsageError(f"a newer grant of {grant.manifest} is here already", advice="Remove it first to go back.")
        path = self._path(grant.manifest)
        with os_errors(f"write {path}"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, data)
        return grant

    def get(self, manifest: Cid) -> Grant:
        """Return the grant of an artifact. Raises GrantMissingError, StoreError where it is damaged."""
        path = self._path(manifest)
        with os_errors(f"read {path}"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise GrantMissingError(f"there is no grant of {manifest} here") from None
            try:
                data = read_up_to(descriptor, MAX_STATEMENT_BYTES + 1)
            finally:
                os.close(descriptor)
        try:
            return Grant.decode(SignedStatement.decode(data).payload)
        except P2pkvError as error:
            raise StoreError(
                f"{path} is damaged: {error.message}", advice="Remove the file and add the grant again."
            ) from None

    def remove(self, manifest: Cid) -> bool:
        """Take a grant away; return whether there was one. Raises StoreError."""
        path = self._path(manifest)
        with os_errors(f"remove {path}"):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def __iter__(self) -> Iterator[Cid]:
        """Yield the artifacts that there are grants of. Raises StoreError."""
        with os_errors(f"list {self._folder}"):
            names = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        for name in names:
            try:
                yield Cid.parse(name.removesuffix(SUFFIX))
            except P2pkvError:
                continue  # what others put there, or was being written when the power went

    def _path(self, manifest: Cid) -> Path:
        return self._folder / f"{manifest}{SUFFIX}"
