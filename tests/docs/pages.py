"""The project's pages: which there are, and what of Markdown the tests look at."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCED.sub("", read(name))


def anchors(name: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in _HEADING.findall(prose(name)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def section(name: str, heading: str) -> str:
    """Return what stands under ``heading``, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    lines = read(name).splitlines()
    start = lines.index(heading) + 1
    ends = (i for i in range(start, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i]))
    return "\n".join(lines[start : next(ends, len(lines))])


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows of ``text``, their rules left out."""
    found = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in found if set("".join(row)) - set("-| ")]
