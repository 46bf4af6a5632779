"""The log of a node on stderr: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

from p2pkv.errors import P2pkvError, error_classes

TEXT: Final = "text"
JSON: Final = "json"
FORMATS: Final = (TEXT, JSON)

logger = logging.getLogger(__name__)


def start_logging(level: str, form: str) -> None:
    """Log to stderr from ``level`` on, in one of FORMATS; as JSON also what Python itself would say there of a defect."""
    handler = logging.StreamHandler(sys.stderr)
    if form == JSON:
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_defect
        threading.excepthook = _log_defect_of_thread
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON, in ASCII, of a record: nothing that a stranger wrote can end the line or steer a terminal.

    ``time`` (UTC, ISO 8601, milliseconds), ``level``, ``logger`` and ``message``; ``code`` of an error of the tree that the
    record is about, and its ``advice`` where the error itself was logged; ``traceback`` of an exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._codes = frozenset(error_classes())

    def format(self, record: logging.LogRecord) -> str:
        message, code, advice = record.getMessage(), self._code_of(record), None
        error = _error_of(record)
        if error is not None:
            # Text has code and advice in the message, since it has no other place for them.
            message, code, advice = message.replace(str(error), error.message), error.code, error.advice
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None
        entry = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            "code": code,
            "advice": advice,
            "traceback": trace,
        }
        return json.dumps({name: value for name, value in entry.items() if value is not None})

    def _code_of(self, record: logging.LogRecord) -> str | None:
        """Return the code that was handed to the message by itself."""
        texts = (argument for argument in _arguments(record) if isinstance(argument, str))
        return next((text for text in texts if text in self._codes), None)


def _error_of(record: logging.LogRecord) -> P2pkvError | None:
    """Return the error of the tree that was logged: handed to the message, or being handled."""
    caught = record.exc_info[1] if record.exc_info else None
    return next((found for found in (*_arguments(record), caught) if isinstance(found, P2pkvError)), None)


def _arguments(record: logging.LogRecord) -> tuple[object, ...]:
    return record.args if isinstance(record.args, tuple) else ()


def _log_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("a defect ends the node: %s", kind.__name__, exc_info=(kind, error, trace))


def _log_defect_of_thread(arguments: threading.ExceptHookArgs) -> None:
    trace = (arguments.exc_type, arguments.exc_value or arguments.exc_type(), arguments.exc_traceback)
    logger.critical("a defect ends a thread of the node: %s", arguments.exc_type.__name__, exc_info=trace)
