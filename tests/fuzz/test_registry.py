"""No decoder without a target: whoever adds one is told so here."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from p2pkv.errors import P2pkvError
from tests.fuzz.registry import EXCEPTIONS, ROOT, TARGETS, decoders
from tests.fuzz.target import ACCEPTED


def calls_of_all_seeds() -> set[tuple[str, str]]:
    """Return the file and the name of every function of the project that some target's seeds reach."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        for target in TARGETS.values():
            for seed in target.seeds:
                with suppress(P2pkvError):
                    target.check(seed)
    finally:
        sys.setprofile(None)
    return {(str(Path(file).relative_to(ROOT)), name) for file, name in called if file.startswith(str(ROOT))}


def test_every_decoder_is_reached_by_a_target_or_is_excepted_with_a_reason() -> None:
    found = set(decoders())
    assert {("p2pkv/formats/dagcbor.py", "decode"), ("node/p2pkv_node/kad_client.py", "_parse")} <= found  # it looks at all
    reached = calls_of_all_seeds()
    missing = {f"{file}:{name}" for file, name in found - reached}
    assert missing - EXCEPTIONS.keys() == set(), "add a target, or an exception with its reason, in tests/fuzz/registry.py"
    assert EXCEPTIONS.keys() - missing == set(), "these are reached, or are gone: they are no exceptions any more"
    assert all(EXCEPTIONS.values())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    """At least one is accepted, else mutation never gets anywhere; and none escapes."""
    target = TARGETS[name]
    assert ACCEPTED in {target.run(seed) for seed in target.seeds}
