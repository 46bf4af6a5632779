"""The commands of ``p2pkv``, as the program itself has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from p2pkv.cli.app import app


def commands() -> dict[str, Any]:
    """Return every command that is no group by its name, ``trust add``; Typer's own copy of click has no types that tell."""
    return dict(_leaves(typer.main.get_command(app), ""))


def options(command: Any) -> list[tuple[str, ...]]:
    """Return the names of each option that is not common to all commands, ``--shared`` and ``--no-shared`` together."""
    found = [(*parameter.opts, *parameter.secondary_opts) for parameter in command.params]
    return [names for names in found if names[0].startswith("--") and names[0] not in ("--home", "--json")]


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for part, child in children.items():
        yield from _leaves(child, f"{name} {part}".strip())
