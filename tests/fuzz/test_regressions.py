"""Inputs that once escaped, and what is said of them now. ``make fuzz`` prints an escape in hex, ready for a line here."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.machine import TARGETS as OF_MACHINE
from tests.fuzz.registry import TARGETS

_SEALED_PACK = next(target for target in OF_MACHINE if target.name == "pack").seeds[0]
_CONFIG = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": ["llama3"]}}

CASES: list[tuple[str, str, bytes, str]] = [
    ("an answer that is no protobuf", "kad-answer", b"\xff", "peer.unreachable"),
    ("an event of a kind that is none", "bulk-event", bytes(48), "wire.protocol"),
    ("an event that is too short", "bulk-event", b"\x01", "wire.protocol"),
    ("an event in a slot beyond the memory", "bulk-event", b"\x01\0\0\0\0\xff\xff" + bytes(41), "wire.protocol"),
    ("a command whose host is not ASCII", "bulk-command", b"\x01" + bytes(8) + b"\xff" * 64 + bytes(161), "wire.protocol"),
    ("an error whose code is a list", "event", b'data: {"event": "error", "code": [1]}', "internal"),
    (
        "an error whose code is a map",
        "answer",
        b"\xc8" + json.dumps({"error": {"code": {"a": 1}, "message": 7}}).encode(),
        "internal",
    ),
    ("a rope type that is a list", "checkpoint-config", json.dumps(_CONFIG).encode(), "model.unsupported"),
    ("a sealed pack that lost a piece", "pack", _SEALED_PACK[:64] + _SEALED_PACK[-160:], "accepted"),
    ("a digest beside a checkpoint in a thousand brackets", "digest-slot", b"[" * 100_000, "accepted"),
]


@pytest.mark.parametrize(("name", "data", "outcome"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_once_escaped_is_refused(name: str, data: bytes, outcome: str) -> None:
    assert TARGETS[name].run(data) == outcome
