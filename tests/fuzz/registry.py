"""All targets by name, and the decoders that have none, each with its reason.

A decoder is a function that is named like one (:data:`NAMES`) and takes bytes or a file; ``test_registry`` walks the packages
for them and requires that the seeds of some target reach each of them, or that it stands in :data:`EXCEPTIONS`. A new decoder
takes a check, a line in the table of a module beside this one, and seeds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.fuzz import files, formats, machine, trust, wire
from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for table in (formats.TARGETS, wire.TARGETS, trust.TARGETS, files.TARGETS, machine.TARGETS)
    for target in table
}

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (ROOT / "p2pkv", ROOT / "node" / "p2pkv_node")
# What is called `read_into` fills a buffer, and looks at nothing in it.
NAMES: Final = re.compile(
    r"_*(decode|parse|read(?!_into)|feed|receive_data|from_bytes|split|takes_up|token_of|check_car|is_car)(_\w+)?"
)
# What it takes: bytes, or the file that has them.
_SOURCES: Final = {"bytes", "bytearray", "memoryview", "Buffer", "Path"}

# By file and name: what takes such a source and is called like a decoder, and needs no target.
_FILLS: Final = "the bytes are a buffer that it fills, and looks at nothing in it"
EXCEPTIONS: Final[dict[str, str]] = {
    "node/p2pkv_node/kad_client.py:_read_message": "reads a stream for _split_frame and _parse, which have targets",
    "p2pkv/artifact/build.py:split_layer": "cuts tensors of our own",
    "p2pkv/artifact/private.py:decode": "a sealed block opens as it was sealed or not at all",
    "p2pkv/cli/artifacts.py:_check_car": "tells in words what check_car finds, which has a target",
    "p2pkv/connectors/hf/weights.py:read_json": "reads a file for _parse_json, which has a target",
    "p2pkv/ports.py:read_block": _FILLS,
    "p2pkv/store/grants.py:_read": "reads a file for _parse, which has a target",
    "p2pkv/store/location.py:read_at": _FILLS,
    "p2pkv/store/location.py:read_located": _FILLS,
    "p2pkv/store/namespaces.py:read_namespace": "finds the file for _read, which has a target",
    "p2pkv/store/publisher_key.py:read_publisher_key": "the bytes are a passphrase; the file has a target",
    "p2pkv/swarm/lane.py:read_block": _FILLS,
    "p2pkv/swarm/serve.py:read_block": _FILLS,
}


def decoders() -> Iterator[tuple[str, str]]:
    """Yield the file, relative to the project, and the name of each decoder of the product."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if (
                    isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and NAMES.fullmatch(node.name)
                    and _takes_a_source(node)
                ):
                    yield str(path.relative_to(ROOT)), node.name


def _takes_a_source(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(
        isinstance(name, ast.Name) and name.id in _SOURCES
        for argument in arguments
        if argument.annotation is not None
        for name in ast.walk(argument.annotation)
    )
