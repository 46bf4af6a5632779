"""The golden vectors are what a second implementation makes, and the pages of ``docs/spec/`` speak of vectors that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from p2pkv import limits
from tests.support import vectors
from tests.vectors import make
from tests.vectors.form import render

SPEC = Path(__file__).parents[2] / "docs" / "spec"
PAGES = sorted(page.name for page in SPEC.glob("*.md"))
# How a page names vectors, "[segment.json](../../tests/vectors/segment.json)", and quotes bytes, "`82 00 02`".
VECTOR_LINK = re.compile(r"\((\.\./\.\./tests/vectors/[^)]*)\)")
NAMED_VECTOR = re.compile(r"\(\.\./\.\./tests/vectors/([a-z-]+\.json)\), `([^`]+)`")
PAGE_LINK = re.compile(r"\]\(([a-z-]+\.md)(?:#[^)]*)?\)")
HEX_BLOCK = re.compile(r"^```hex\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT = re.compile(r"`(MAX_[A-Z_]+|SEGMENT_TOKENS)` \(([\d,]+)")


@pytest.mark.parametrize("name", sorted(make.FILES))
def test_the_second_implementation_makes_the_same_file(name: str) -> None:
    assert (vectors.FOLDER / name).read_text(encoding="utf-8") == render(make.FILES[name]())


def test_every_file_is_made() -> None:
    assert {path.name for path in vectors.FOLDER.glob("*.json")} == set(make.FILES)


@pytest.mark.parametrize("name", sorted(path.name for path in vectors.FOLDER.glob("*.py")))
def test_the_second_implementation_uses_nothing_of_the_first(name: str) -> None:
    tree = ast.parse((vectors.FOLDER / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in imported if module.split(".")[0] == "p2pkv" or module.startswith("tests.support")}


def test_every_piece_has_a_comment() -> None:
    for name in make.FILES:
        for entry in vectors.document(name)["vectors"]:
            assert all(piece["comment"] for piece in entry["pieces"])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_what_exists(page: str) -> None:
    text = (SPEC / page).read_text(encoding="utf-8")
    for target in (*VECTOR_LINK.findall(text), *PAGE_LINK.findall(text)):
        assert (SPEC / target).resolve().exists(), target
    for file, name in NAMED_VECTOR.findall(text):
        assert name in vectors.load(file), f"{file} has no vector {name!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_the_example_of_a_page_is_part_of_a_vector(page: str) -> None:
    text = (SPEC / page).read_text(encoding="utf-8")
    known = [vector.data for file in make.FILES for vector in vectors.load(file).values()]
    blocks = HEX_BLOCK.findall(text)
    assert blocks, "a page shows bytes"
    for block in blocks:
        shown = "".join(line.split("#")[0] for line in block.splitlines())
        data = bytes.fromhex(shown)
        assert any(data in vector for vector in known), block


@pytest.mark.parametrize("page", PAGES)
def test_a_page_tells_the_limits_of_the_code(page: str) -> None:
    for name, number in LIMIT.findall((SPEC / page).read_text(encoding="utf-8")):
        assert getattr(limits, name) == int(number.replace(",", "")), name
