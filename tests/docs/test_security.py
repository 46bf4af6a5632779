"""The threats that security.md tells of: each says what shows it, or that nothing does."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, rows, section

THREATS = rows(section("docs/security.md", "## Threats"))[1:]
TEST = re.compile(r"`(tests/[\w/]+\.py)`")


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: f"{threat[0]} {threat[1]}"[:60])
def test_what_stops_a_threat_is_shown_or_said_not_to_be(threat: list[str]) -> None:
    assert len(threat) == 5
    shown = TEST.findall(threat[4])
    assert shown or "no test" in threat[4]
    for file in shown:
        assert (ROOT / file).is_file(), file


def test_every_family_of_attacks_stands_in_it() -> None:
    """A file of attacks that no threat names stops nobody whom this page knows."""
    families = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/hostile/test_*.py")}
    of_the_suite = {"tests/hostile/test_resident.py"}
    assert families - of_the_suite <= {file for threat in THREATS for file in TEST.findall(threat[4])}
