"""Exception groups of nurseries, reduced to the one error that tells the cause."""

from __future__ import annotations

from p2pkv.errors import P2pkvError, ProtocolError


def first_error(group: BaseExceptionGroup[P2pkvError]) -> P2pkvError:
    """Return one error of a nursery's group: a protocol fault says more than the broken stream that follows it."""
    errors: list[P2pkvError] = []
    pending: list[BaseException] = [group]
    while pending:
        item = pending.pop()
        if isinstance(item, BaseExceptionGroup):
            pending.extend(item.exceptions)
        elif isinstance(item, P2pkvError):
            errors.append(item)
    return next((error for error in errors if isinstance(error, ProtocolError)), errors[0])
