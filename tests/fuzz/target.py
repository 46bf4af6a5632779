"""What is fuzzed: a decoder, valid bytes to begin with, and what it may refuse them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2pkv.errors import FormatError, P2pkvError

ACCEPTED: Final = "accepted"
ESCAPED: Final = "escaped"


class EscapeError(AssertionError):
    """A decoder did with bytes what it promises never to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder of bytes that others made.

    ``check`` feeds it, and holds what it returns to the bytes that it came from: see :func:`hold`. ``refusals`` are the
    errors that it promises, each with its subclasses. ``seeds`` are valid, or refused for one reason; mutation does the rest.
    """

    name: str
    check: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[P2pkvError], ...] = (FormatError,)

    def run(self, data: bytes) -> str:
        """Return :data:`ACCEPTED` or the code of the refusal. Whatever else is raised is an escape."""
        try:
            self.check(data)
        except self.refusals as error:
            return error.code
        except P2pkvError as error:
            raise EscapeError(f"{type(error).__name__} is not what {self.name} promises: {error}") from error
        return ACCEPTED


def hold(found: object, expected: object) -> None:
    """Raise EscapeError unless the two are equal: what was decoded, written again, and the bytes that it came from."""
    if found != expected:
        raise EscapeError(f"{found!r:.200} is not {expected!r:.200}")
