"""A little of ``make fuzz`` in every run of the tests: mutated valid bytes, and bytes of chance, to every decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.errors import FormatError, IntegrityError
from tests.fuzz.mutation import MUTATIONS, Draw, mutate
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import EscapeError, Target, hold

# Of each target: enough that each mutation comes several times; the long runs are those of `make fuzz`.
_EXAMPLES = 50


def draw_from(entropy: bytes) -> Draw:
    """Return a source of chance that Hypothesis can shrink: bytes, and zeros behind them."""
    at = 0

    def draw(bound: int) -> int:
        nonlocal at
        at += 3
        return int.from_bytes(entropy[at - 3 : at], "little") % bound

    return draw


@pytest.mark.parametrize("name", TARGETS)
@settings(deadline=None, max_examples=_EXAMPLES)
@given(entropy=st.binary(max_size=120))
def test_mutated_bytes_are_accepted_or_refused_as_promised(name: str, entropy: bytes) -> None:
    target = TARGETS[name]
    target.run(mutate(target.seeds, draw_from(entropy)))


@pytest.mark.parametrize("name", TARGETS)
@settings(deadline=None, max_examples=_EXAMPLES)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_as_promised(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


@pytest.mark.parametrize("mutation", dict.fromkeys(MUTATIONS), ids=lambda mutation: mutation.__name__)
@settings(deadline=None, max_examples=_EXAMPLES)
@given(data=st.binary(max_size=40), entropy=st.binary(max_size=60))
def test_a_mutation_takes_any_bytes(mutation: object, data: bytes, entropy: bytes) -> None:
    assert callable(mutation)
    mutation(data, (data, b"another"), draw_from(entropy))


def test_what_is_not_promised_is_an_escape() -> None:
    def lie(data: bytes) -> None:
        raise IntegrityError("not a format")

    with pytest.raises(EscapeError, match="not what liar promises"):
        Target("liar", lie, (b"",), (FormatError,)).run(b"")
    with pytest.raises(EscapeError):
        Target("other bytes", lambda data: hold(data + b"x", data), (b"",)).run(b"")
    with pytest.raises(ZeroDivisionError):
        Target("defect", lambda data: 1 // len(data), (b"x",)).run(b"")
