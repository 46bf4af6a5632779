"""A lease on an artifact: its blocks stay where they are while a program reads them there."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from p2pkv.client import calls
from p2pkv.client.calls import Call, read_locations
from p2pkv.errors import DaemonUnreachableError, NotFoundError, P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.store.location import Location, opened
from p2pkv.store.stored_blocks import damaged

logger = logging.getLogger(__name__)

# A lease is renewed so often before it would expire: a busy machine, and a daemon that is started anew, cost it nothing.
_RENEWALS: Final = 3


class Lease:
    """Keeps a whole artifact until :meth:`give_back`, renewed by a thread of its own.

    ``call`` sends a call to the daemon and is used by one thread at a time; ``folder`` is that of the home's blocks. Raises
    NotFoundError, FetchIncompleteError, UsageError, DaemonUnreachableError.
    """

    def __init__(self, call: Callable[[Call], dict[str, Any]], folder: Path, manifest: Cid, seconds: float) -> None:
        self.manifest = manifest
        self._call = call
        self._folder = folder
        self._seconds = seconds
        answer = call(calls.lease(manifest, seconds))
        self._name = str(answer["lease"])
        self.blocks: Mapping[Cid, Location] = {Cid.parse(cid): place for cid, place in read_locations(answer).items()}
        """Where everything of the artifact lies: its envelope, the block of its token ids if any, nodes and blocks."""
        self._mapped: dict[str, mmap.mmap] = {}
        self._lost: P2pkvError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="p2pkv-lease", daemon=True)
        self._thread.start()

    def map(self, cid: Cid) -> memoryview:
        """Return a block's bytes where they lie, read only, verified now. Good until the lease is given back.

        Raises NotFoundError for what is not of the artifact, IntegrityError for a block that rotted on the disk, StoreError.
        """
        location = self.blocks.get(cid)
        if location is None:
            raise NotFoundError(f"block {cid} is not of {self.manifest}, or was lost", advice="Fetch the artifact again.")
        end = location.offset + location.size
        pack = self._mapped.get(location.file)
        if pack is None or len(pack) < end:
            pack = self._mapped[location.file] = self._map(location, end)
        data = memoryview(pack)[location.offset : end]
        if not cid.matches(data):
            raise damaged(cid)
        return data

    def check(self) -> None:
        """Raise why the lease was lost, if it was: what was read since then may have been taken away."""
        if self._lost is not None:
            raise self._lost

    def give_back(self) -> None:
        """End the lease. What was mapped is not to be used any more."""
        self._ended.set()
        self._thread.join()
        self._mapped.clear()  # the memory goes with the last view of it
        try:
            self._call(calls.release(self._name))
        except P2pkvError as error:
            logger.info("a lease is left to expire: %s", error)

    def _map(self, location: Location, size: int) -> mmap.mmap:
        with opened(self._folder, location) as descriptor:
            if os.fstat(descriptor).st_size < size:
                raise NotFoundError(f"{location.file} is cut off", advice="Fetch the artifact again.")
            return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWALS):
            try:
                self._renew_once()
            except DaemonUnreachableError as error:
                logger.info("a lease could not be renewed, and is tried again: %s", error)
            except P2pkvError as error:
                self._lost = error
                return

    def _renew_once(self) -> None:
        try:
            self._call(calls.renew(self._name, self._seconds))
        except NotFoundError:  # the daemon was started anew: what the old lease keeps stays until that expires
            self._name = str(self._call(calls.lease(self.manifest, self._seconds))["lease"])
