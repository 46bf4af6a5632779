"""Every link between the pages leads somewhere: to a file of the checkout, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import NAMES, PAGES, ROOT, anchors, prose

LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file or a folder, not the names of kinds and domains in the formats, which look alike.
CODE_PATH = re.compile(r"`((?:p2pkv|p2pkv_node|node|sims|tests|docs|bench)/(?:[\w.-]+/)*(?:[\w-]+\.\w+)?)`")


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    for target in LINK.findall(prose(name)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        page = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert page.exists(), f"{name} links {target}, which does not exist"
        assert page.is_relative_to(ROOT), f"{name} links {target}, outside of the project"
        if anchor:
            assert anchor in anchors(str(page.relative_to(ROOT))), f"{name} links {target}: no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_are_named_exist(name: str) -> None:
    for path in CODE_PATH.findall(prose(name)):
        folder = ROOT / "node" if path.startswith("p2pkv_node/") else ROOT
        assert (folder / path).exists(), f"{name} names {path}, which does not exist"


def test_the_index_lists_every_page_of_docs() -> None:
    listed = {Path(target.partition("#")[0]) for target in LINK.findall(prose("docs/README.md"))}
    pages = {page.relative_to(ROOT / "docs") for page in PAGES if page.parent == ROOT / "docs"}
    assert pages - {Path("README.md")} <= listed
