"""Two stores for simulations and tests: one in memory, and one that tampers with what is read from another.

The first is the twin of :class:`p2pkv.store.store.Store`; one contract suite holds both.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.ports import BlockStore, Buffer


class MemoryBlockStore:
    """Blocks in a dictionary, up to ``capacity`` bytes where one is given: beyond it the "disk" is full.

    Stores that are given the same ``shared`` dictionary keep one copy of equal blocks, so that fifty of them fit in memory.
    """

    def __init__(self, capacity: int | None = None, *, shared: dict[Cid, bytes] | None = None) -> None:
        self.capacity = capacity
        self._blocks: dict[Cid, bytes] = {}
        self._shared = shared

    def has(self, cid: Cid) -> bool:
        return cid in self._blocks

    def size(self, cid: Cid) -> int:
        """Return the bytes of a block. Raises NotFoundError."""
        data = self._blocks.get(cid)
        if data is None:
            raise NotFoundError(f"block {cid} is not stored here")
        return len(data)

    def read_into(self, cid: Cid, buffer: memoryview) -> int:
        """Read a block into the front of ``buffer``. Raises what :meth:`read` does, UsageError for a buffer too short."""
        data = self.read(cid)
        if len(data) > len(buffer):
            raise UsageError(f"a block of {len(data)} bytes does not fit a buffer of {len(buffer)}")
        buffer[: len(data)] = data
        return len(data)

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes; a damaged block is gone after its IntegrityError. Raises NotFoundError."""
        data = self._blocks.get(cid)
        if data is None:
            raise NotFoundError(f"block {cid} is not stored here")
        if not cid.matches(data):
            del self._blocks[cid]
            raise IntegrityError(f"block {cid} is damaged and was removed")
        return data

    def write(self, cid: Cid, data: Buffer) -> None:
        """Store bytes that the caller has verified. Raises DiskFullError."""
        block = bytes(data)
        if self.capacity is not None:
            used = sum(len(stored) for known, stored in self._blocks.items() if known != cid)
            if used + len(block) > self.capacity:
                raise DiskFullError(f"cannot store block {cid}: {used} of {self.capacity} bytes are used")
        self._blocks[cid] = block if self._shared is None else self._shared.setdefault(cid, block)

    def damage(self, cid: Cid, data: bytes) -> None:
        """Put wrong bytes in a block's place, as a bad disk does."""
        self._blocks[cid] = data


class TamperedStore:
    """A store whose reads pass through ``tamper(cid, data)``: it may change the bytes, wait, or tell somebody."""

    def __init__(self, inner: BlockStore, tamper: Callable[[Cid, bytes], bytes]) -> None:
        self._inner = inner
        self._tamper = tamper

    def has(self, cid: Cid) -> bool:
        return self._inner.has(cid)

    def read(self, cid: Cid) -> bytes:
        return self._tamper(cid, self._inner.read(cid))

    def size(self, cid: Cid) -> int:
        return self._inner.size(cid)

    def read_into(self, cid: Cid, buffer: memoryview) -> int:
        data = self.read(cid)
        buffer[: len(data)] = data
        return len(data)

    def write(self, cid: Cid, data: Buffer) -> None:
        self._inner.write(cid, data)
