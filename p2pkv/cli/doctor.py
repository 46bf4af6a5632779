"""``p2pkv doctor``: what is wrong here, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import reporting
from p2pkv.errors import EXIT_STATUS, Fault
from p2pkv.units import plural

if TYPE_CHECKING:
    from p2pkv.client.doctor.finding import Finding


def doctor(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Look for what is wrong with the home, this machine and the node, and say what to do.

    Home, keys, trust, lock, index, packs, disk, clock, open files; and of a node that runs also version, ports,
    reachability, DHT and announcements. Changes nothing and asks no network. Exit status 0 without a problem; warnings
    and what is not known are none.

    \b
    Example:
      p2pkv doctor
      p2pkv doctor --json
    """
    with reporting(as_json) as output:
        from p2pkv.client.doctor.examine import examine
        from p2pkv.client.doctor.finding import State

        place = home_of(home)
        findings = examine(place)
        problems = sum(finding.state is State.PROBLEM for finding in findings)
        warnings = sum(finding.state is State.WARNING for finding in findings)
        document = {"ok": not problems, "home": str(place), "findings": [finding.to_dict() for finding in findings]}
        summary = f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}"
        output.result(document, [*_lines(findings), summary])
        if problems:
            raise typer.Exit(EXIT_STATUS[Fault.ENVIRONMENT])


def _lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each finding and one for its advice; neighbours that say the same share theirs."""
    alike = groupby(findings, key=lambda finding: (finding.state, finding.found, finding.advice))
    rows = [(state, ", ".join(finding.name for finding in group), found, advice) for (state, found, advice), group in alike]
    lines: list[str] = []
    for state, names, found, advice in rows:
        lines.append(f"{state.value:<9}  {names}: {found}")
        if advice:
            lines.append(f"{'':<9}  -> {advice}")
    return lines
