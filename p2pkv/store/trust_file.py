"""The rules about whom this home believes, one JSON file that people may read and edit; CLI and daemon both change it.

A change is made under a lock of its own beside the file and replaces it whole, so readers need no lock. A daemon sees what
the CLI changed at its next look.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from p2pkv.errors import FormatError, StoreError, UsageError
from p2pkv.limits import MAX_TRUST_FILE_BYTES
from p2pkv.store.files import locked, os_errors, replace_file
from p2pkv.store.versioned_json import read_list
from p2pkv.trust.rules import Action, Namespace, Rule

VERSION: Final = 2
# The scope may be left out of a rule, and the note and the date by whoever writes one by hand.
_FIELDS: Final = frozenset({"action", "publisher", "model", "licence", "namespace", "note", "added"})
_ADVICE: Final = "A rule has action, publisher and, where wanted, model, licence, namespace and note."


class TrustFile:
    """The rules in ``path``; a missing file means that nobody is trusted. Every method may be called from any thread.

    All methods raise StoreError for a damaged file and UnknownVersionError for that of a newer p2pkv.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._rules: tuple[Rule, ...] = ()

    def rules(self) -> tuple[Rule, ...]:
        """Return all rules in the order they were added; one look at the file's stamp where it did not change."""
        with self._lock, os_errors(f"read {self._path}"):
            try:
                with self._path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                    if stamp != self._stamp:
                        if found.st_size > MAX_TRUST_FILE_BYTES:
                            raise self._damaged(f"is larger than {MAX_TRUST_FILE_BYTES} bytes")
                        self._rules = self._parse(file.read(MAX_TRUST_FILE_BYTES))
                        self._stamp = stamp
            except FileNotFoundError:
                self._stamp, self._rules = None, ()
            return self._rules

    def add(self, did: str, note: str, now: int) -> bool:
        """Trust all that ``did`` signs, and return whether that is new. Raises as :class:`Rule` and :meth:`add_rule` do."""
        return self.add_rule(Rule(Action.ACCEPT, did, note=note, added=now))

    def add_rule(self, rule: Rule) -> bool:
        """Add ``rule`` and return whether it is new. One that says the same keeps its place and date, and gets the new note.

        Raises UsageError where the file would grow beyond MAX_TRUST_FILE_BYTES.
        """
        with self._changing():
            rules = {known.key: known for known in self.rules()}
            before = rules.get(rule.key)
            if before is not None:
                rule = Rule(*rule.key, note=rule.note, added=before.added)
            rules[rule.key] = rule
            self._replace(tuple(rules.values()))
        return before is None

    def remove(self, publisher: str, unwanted: Callable[[Rule], bool] = lambda rule: True) -> tuple[Rule, ...]:
        """Take away the ``unwanted`` rules that name ``publisher``, and return them."""
        with self._changing():
            rules = self.rules()
            gone = tuple(rule for rule in rules if rule.publisher == publisher and unwanted(rule))
            if gone:
                self._replace(tuple(rule for rule in rules if rule not in gone))
        return gone

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one thread of one process at a time read, change and replace the file."""
        path = self._path.with_name(f"{self._path.name}.lock")
        with os_errors(f"create {path.parent}"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path):
            yield

    def _replace(self, rules: tuple[Rule, ...]) -> None:
        document = {"version": VERSION, "rules": [rule_fields(rule) for rule in rules]}
        data = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
        if len(data) > MAX_TRUST_FILE_BYTES:
            raise UsageError(f"{self._path} would exceed {MAX_TRUST_FILE_BYTES} bytes", advice="Remove some rules first.")
        with os_errors(f"write {self._path}"):
            replace_file(self._path, data)

    def _parse(self, data: bytes) -> tuple[Rule, ...]:
        rules = [self._rule(item) for item in read_list(self._path, data, "rules", VERSION, self._damaged)]
        return tuple({rule.key: rule for rule in rules}.values())

    def _rule(self, item: object) -> Rule:
        try:
            return rule_from(item)
        except UsageError as error:
            raise self._damaged(f"has a rule that is none ({error.message})") from None

    def _damaged(self, complaint: str) -> StoreError:
        return StoreError(
            f"{self._path} {complaint}",
            advice="Nobody is trusted until it is mended: correct it, or move it away and run `p2pkv trust add` again.",
        )


def rule_fields(rule: Rule) -> dict[str, Any]:
    """Return ``rule`` as JSON values, as the file and the CLI show it; what it leaves open is left out."""
    scope = {
        "model": None if rule.model is None else rule.model.hex(),
        "licence": rule.licence,
        "namespace": None if rule.namespace is None else rule.namespace.value,
    }
    return {
        "action": rule.action.value,
        "publisher": rule.publisher,
        **{name: value for name, value in scope.items() if value is not None},
        "note": rule.note,
        "added": rule.added,
    }


def rule_from(item: object) -> Rule:
    """Return the rule that JSON values say, the inverse of :func:`rule_fields`. Raises UsageError."""
    if not isinstance(item, dict) or not item.keys() <= _FIELDS:
        raise UsageError(f"it has other fields than {', '.join(sorted(_FIELDS))}", advice=_ADVICE)
    match {"model": None, "licence": None, "namespace": None, "note": "", "added": 0, **item}:
        case {
            "action": str(action),
            "publisher": str(publisher),
            "model": None | str() as model,
            "licence": None | str() as licence,
            "namespace": None | str() as namespace,
            "note": str(note),
            "added": int(added),
        } if not isinstance(added, bool):
            try:
                return Rule(
                    Action(action),
                    publisher,
                    None if model is None else bytes.fromhex(model),
                    licence,
                    None if namespace is None else Namespace(namespace),
                    note,
                    added,
                )
            except FormatError as error:
                raise UsageError(error.message, advice=error.advice) from None
            except ValueError as error:
                raise UsageError(str(error), advice=_ADVICE) from None
    raise UsageError("action or publisher is missing, or a field has another type", advice=_ADVICE)
