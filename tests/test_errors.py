"""The one tree of exceptions: stable codes, advice, exit statuses, and the drawing that shows it."""

from __future__ import annotations

import copy
import re

import pytest

from p2pkv import errors
from p2pkv.errors import EXIT_STATUS, Fault, P2pkvError, error_classes, error_from_dict


def tree() -> list[type[P2pkvError]]:
    """Return every class of the tree, each once, independent of :func:`error_classes`."""
    found: list[type[P2pkvError]] = [P2pkvError]
    for cls in found:
        found.extend(child for child in cls.__subclasses__() if child not in found)
    return [cls for cls in found if cls.__module__ == errors.__name__]


CLASSES = tree()
BRANCHES = {cls.__name__: cls for cls in P2pkvError.__subclasses__()}
DRAWN_LINE = re.compile(r"^(?P<indent>[ │]*(?:├|└)── )(?P<name>\w+) +(?P<rest>.*?)\s*$")


def test_every_public_exception_of_the_module_is_in_the_tree() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(CLASSES)


def test_codes_are_unique_and_well_formed() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    for code in codes:
        assert re.fullmatch(r"[a-z]+(\.[a-z_]+)?", code)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_says_its_code_itself_and_whose_doing_it_is(cls: type[P2pkvError]) -> None:
    assert "code" in vars(cls)
    assert isinstance(cls.fault, Fault)
    branch = next((base for base in BRANCHES.values() if issubclass(cls, base)), P2pkvError)
    assert cls.fault is branch.fault


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_has_a_sentence_of_advice(cls: type[P2pkvError]) -> None:
    assert cls.default_advice[0].isupper()
    assert cls.default_advice.endswith(".")
    error = cls("it broke")
    assert error.advice == cls.default_advice
    assert cls("it broke", advice="Mend it.").advice == "Mend it."
    assert str(error) == f"it broke [{cls.code}] {cls.default_advice}"


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, tuple[str, str]] = {}
    path = ["P2pkvError"]
    for line in (errors.__doc__ or "").splitlines():
        match = DRAWN_LINE.match(line.removeprefix("    "))
        if match:
            depth = len(match["indent"]) // 4
            del path[depth:]
            drawn[match["name"]] = (path[-1], match["rest"])
            path.append(match["name"])
    assert set(drawn) == {cls.__name__ for cls in CLASSES} - {"P2pkvError"}
    for cls in CLASSES[1:]:
        parent, rest = drawn[cls.__name__]
        assert cls.__bases__ == (getattr(errors, parent),)
        if cls.__name__ in BRANCHES:
            assert rest.endswith(f"exit {EXIT_STATUS[cls.fault]}")
        else:
            assert rest == cls.code


def test_exit_statuses() -> None:
    assert EXIT_STATUS == {Fault.LOCAL: 2, Fault.REMOTE: 3, Fault.ENVIRONMENT: 4, Fault.POLICY: 5}
    assert {name: cls("x").exit_status for name, cls in BRANCHES.items()} == {
        "LocalError": 2,
        "RemoteError": 3,
        "MachineError": 4,
        "PolicyError": 5,
    }


def test_error_classes_lists_the_tree() -> None:
    found = error_classes()
    assert {cls.code: cls for cls in CLASSES}.items() <= found.items()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("advice", [None, "Do this instead."])
def test_an_error_crosses_a_process_border_unchanged(cls: type[P2pkvError], advice: str | None) -> None:
    error = cls("it broke", advice=advice)
    fields = error.to_dict()
    assert set(fields) == {"code", "fault", "message", "advice"}
    rebuilt = error_from_dict(fields)
    assert type(rebuilt) is cls
    assert rebuilt.to_dict() == fields
    assert rebuilt.exit_status == error.exit_status
    assert copy.copy(error).to_dict() == fields


def test_an_unknown_code_becomes_the_base_class() -> None:
    rebuilt = error_from_dict({"code": "from.the_future", "message": "it broke", "advice": "Upgrade."})
    assert type(rebuilt) is P2pkvError
    assert (rebuilt.message, rebuilt.advice) == ("it broke", "Upgrade.")
    assert error_from_dict({}).message == "unknown error"
