"""Typed reading of decoded maps: every field is taken once, checked, and what is left over is kept for later versions."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeVar

from p2pkv.errors import FormatError, UnknownVersionError
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import MAX_INT, Value
from p2pkv.limits import MAX_TEXT_BYTES

Choice = TypeVar("Choice", bound=StrEnum)


class Fields:
    """One map of a node while it is read. Every method raises ``error`` (a FormatError) with the place of the fault."""

    def __init__(self, node: dict[str, Value], where: str, error: type[FormatError]) -> None:
        self._left = dict(node)
        self._where = where
        self._error = error

    def version(self, kind: str, version: int) -> None:
        """Check ``kind`` and ``version`` before any other field is looked at. Raises UnknownVersionError for another."""
        found_kind = self.text("kind")
        if found_kind != kind:
            raise self._error(f"expected a {kind} node, found {found_kind[:64]!r}")
        found = self.integer("version")
        if found != version:
            raise UnknownVersionError(f"{kind} version {found} is unknown here; version {version} is")

    def integer(self, name: str, low: int = 0, high: int = MAX_INT) -> int:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fault(name, "is not an integer")
        if not low <= value <= high:
            raise self._fault(name, f"is {value}, outside {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 0, high: int = MAX_INT) -> int | None:
        return self.integer(name, low, high) if self._given(name) else None

    def text(self, name: str, limit: int = MAX_TEXT_BYTES) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise self._fault(name, "is not text")
        if len(value.encode()) > limit:
            raise self._fault(name, f"is longer than {limit} bytes")
        return value

    def choice(self, name: str, kinds: type[Choice]) -> Choice:
        """Read text that names one of ``kinds``; the refused name is part of the error."""
        value = self.text(name)
        try:
            return kinds(value)
        except ValueError:
            raise self._fault(name, f"is {value[:64]!r}, which is unknown here") from None

    def fixed_bytes(self, name: str, length: int) -> bytes:
        value = self._take(name)
        if not isinstance(value, bytes) or len(value) != length:
            raise self._fault(name, f"is not a byte string of {length} bytes")
        return value

    def optional_fixed_bytes(self, name: str, length: int) -> bytes | None:
        return self.fixed_bytes(name, length) if self._given(name) else None

    def bytes_up_to(self, name: str, limit: int) -> bytes:
        value = self._take(name)
        if not isinstance(value, bytes) or len(value) > limit:
            raise self._fault(name, f"is not a byte string of at most {limit} bytes")
        return value

    def absent_or_bytes_up_to(self, name: str, limit: int) -> bytes | None:
        """Read a field that is left out where there is nothing to say, and never null."""
        return self.bytes_up_to(name, limit) if name in self._left else None

    def optional_bytes_up_to(self, name: str, limit: int) -> bytes | None:
        return self.bytes_up_to(name, limit) if self._given(name) else None

    def link(self, name: str) -> Cid:
        value = self._take(name)
        if not isinstance(value, Cid):
            raise self._fault(name, "is not a CID link")
        return value

    def optional_link(self, name: str) -> Cid | None:
        return self.link(name) if self._given(name) else None

    def items(self, name: str, limit: int) -> list[Value]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > limit:
            raise self._fault(name, f"is not a list of at most {limit} items")
        return value

    def map(self, name: str) -> Fields:
        value = self._take(name)
        if not isinstance(value, dict):
            raise self._fault(name, "is not a map")
        return Fields(value, f"{self._where}.{name}", self._error)

    def maps(self, name: str, limit: int) -> Iterator[Fields]:
        for index, item in enumerate(self.items(name, limit)):
            if not isinstance(item, dict):
                raise self._fault(name, f"holds something that is not a map at {index}")
            yield Fields(item, f"{self._where}.{name}[{index}]", self._error)

    def rest(self) -> dict[str, Value]:
        """Return the fields that nobody took: those of a later version, kept as they are."""
        return dict(self._left)

    def end(self) -> None:
        """Refuse unknown fields, where nothing later is foreseen."""
        if self._left:
            raise self._error(f"{self._where} has the unknown field {min(self._left)[:64]!r}")

    def _given(self, name: str) -> bool:
        """Take an explicit null away and tell whether a value is left; an absent field is as good as null."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return False
        return True

    def _take(self, name: str) -> Value:
        try:
            return self._left.pop(name)
        except KeyError:
            raise self._fault(name, "is missing") from None

    def _fault(self, name: str, complaint: str) -> FormatError:
        return self._error(f"{self._where}.{name[:64]} {complaint}")
