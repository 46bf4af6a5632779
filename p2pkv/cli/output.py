"""How commands speak: results on stdout, everything else on stderr, and one place that turns errors into exit statuses.

Names, licences and messages may come from strangers, so nothing is printed that could steer a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

from p2pkv.errors import Fault, P2pkvError

EXIT_DEFECT: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
_INDENT: Final = "       "  # under the text behind "p2pkv: "


class Output:
    """Where one command's results and errors go; with ``as_json`` as one JSON object each."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, document: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the result of the command: ``document`` as JSON, or else ``lines`` for people."""
        if self.as_json:
            self.raw(json.dumps(document, ensure_ascii=False) + "\n")
        else:
            self.raw("".join(f"{printable(line)}\n" for line in lines))

    def raw(self, text: str) -> None:
        """Write ``text`` to stdout as it is, and flush it."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Say something beside the result, for people only."""
        if not self.as_json:
            _say(printable(text))

    def error(self, error: P2pkvError) -> None:
        """Show an error: what happened and its code, then what to do."""
        self._failure(error.to_dict())

    def interrupted(self, advice: str) -> None:
        """Show that Ctrl-C ended the command."""
        self._failure({"code": "interrupted", "fault": Fault.LOCAL.value, "message": "interrupted", "advice": advice})

    def _failure(self, fields: Mapping[str, str]) -> None:
        if self.as_json:
            _say(json.dumps({"error": fields}, ensure_ascii=False))
        else:
            _say(f"p2pkv: {printable(fields['message'])} [{fields['code']}]")
            _say(f"{_INDENT}{printable(fields['advice'])}")


@contextmanager
def reporting(as_json: bool, *, interrupted: str = "Nothing was changed.") -> Iterator[Output]:
    """Run one command: an error of the tree ends it with two lines and its exit status, Ctrl-C with 130.

    ``interrupted`` says what an interruption leaves behind and how to go on. Anything that is not of the tree is a defect:
    it is shown without its traceback, unless ``P2PKV_DEBUG`` is set.
    """
    output = Output(as_json)
    try:
        yield output
    except P2pkvError as error:
        _trace()
        output.error(error)
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        output.interrupted(interrupted)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has enough. What is left in the buffer must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # the edge of the program: what is shown here is a defect, named as one
        _trace()
        advice = "This is a defect: please report it with what P2PKV_DEBUG=1 prints."
        output.error(P2pkvError(f"{type(error).__name__}: {error}", advice=advice))
        raise typer.Exit(EXIT_DEFECT) from None


def fields(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return ``name  value`` lines with the values below one another; an empty name continues the one above."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {value}" for name, value in pairs]


def printable(text: str) -> str:
    """Return ``text`` without control and formatting characters, which could steer or deceive a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _trace() -> None:
    if os.environ.get("P2PKV_DEBUG"):
        traceback.print_exc()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
