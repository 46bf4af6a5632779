"""The trust decision, step by step. By default nobody is trusted (design, section 9).

:func:`judge` is pure and the one place that decides; whoever fetches, imports, shows or serves an artifact asks it. It goes
through all steps, also behind one that fails, so that a person sees every reason at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from p2pkv.errors import ExpiredError, PolicyError, RejectedError, RevokedError, SupersededError, UntrustedPublisherError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.trust.record import Record, Records, succeeded
from p2pkv.trust.rules import ANYBODY, Action, Rule
from p2pkv.units import format_seconds

NO_RECORDS: Final[Records] = MappingProxyType({})


class Check(StrEnum):
    """The steps of a decision, in their order."""

    RULES = "rules"
    KEY = "key"
    REVOCATIONS = "revocations"
    EXPIRY = "expiry"
    CLOCK = "clock"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Step:
    """One step and what it found, as a sentence; ``error`` says why it fails, ``None`` where it does not."""

    check: Check
    text: str
    error: PolicyError | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """All steps in their order. Accepted where none fails."""

    steps: tuple[Step, ...]

    @property
    def errors(self) -> tuple[PolicyError, ...]:
        """Every reason against the artifact; the first is the one that is raised."""
        return tuple(step.error for step in self.steps if step.error is not None)

    @property
    def accepted(self) -> bool:
        return not self.errors

    def require(self) -> None:
        """Raise the first reason against the artifact, if there is one."""
        for error in self.errors:
            raise error


def judge(
    manifest: Manifest,
    cid: Cid,
    rules: Sequence[Rule],
    records: Mapping[str, Record],
    now: float,
    *,
    newest: int | None = None,
) -> Decision:
    """Decide whether the artifact ``cid`` may be used here. The signature of ``manifest`` is verified already.

    ``records`` are what publishers said, ``now`` is wall time in seconds since the epoch. ``newest`` is the highest sequence
    number known of this publisher's artifacts for the same text and model, where any is known: a lower one is told and does
    not refuse, since an older artifact is not a wrong one, and its publisher can take it back.

    The decision's errors are RejectedError, UntrustedPublisherError, RevokedError and ExpiredError.
    """
    record = records.get(manifest.publisher, Record(manifest.publisher))
    return Decision(
        (
            _rules(manifest, rules, records),
            _key(manifest, record),
            _revocations(manifest, cid, record),
            _expiry(manifest, now),
            _clock(manifest, now),
            _sequence(manifest, newest),
        )
    )


def _rules(manifest: Manifest, rules: Sequence[Rule], records: Records) -> Step:
    """Any rule that rejects wins; then any that accepts; then nobody is trusted. Rules for a key hold for those after it."""
    did = manifest.publisher
    matching = [rule for rule in rules if rule.covers(manifest) and _names(rule, did, records)]
    rejecting = next((rule for rule in matching if rule.action is Action.REJECT), None)
    if rejecting is not None:
        reason = f" ({rejecting.note})" if rejecting.note else ""
        error = RejectedError(
            f"your rule rejects it: {rejecting}{reason}", advice=f"If you disagree with it, run `{_removal(rejecting)}`."
        )
        return Step(Check.RULES, error.message, error)
    accepting = next((rule for rule in matching if rule.action is Action.ACCEPT), None)
    if accepting is not None:
        followed = "" if accepting.publisher == did else f", whose key was replaced by {did}"
        return Step(Check.RULES, f"your rule accepts it: {accepting}{followed}")
    others = sum(_names(rule, did, records) for rule in rules)
    scoped = f" for this: none of your {others} rules about it covers model, licence and namespace" if others else ""
    replaced = [rule.publisher for rule in rules if did in _named_successors(records.get(rule.publisher))]
    stopped = f"; it was named to follow {replaced[0]}, and that succession is not followed" if replaced else ""
    untrusted = UntrustedPublisherError(
        f"{did} is not trusted{scoped}{stopped}",
        advice=f"If you know the publisher, run `p2pkv trust add {did}`.",
    )
    return Step(Check.RULES, untrusted.message, untrusted)


def _names(rule: Rule, did: str, records: Records) -> bool:
    return rule.publisher == ANYBODY or did in succeeded(rule.publisher, records)


def _named_successors(record: Record | None) -> Iterator[str]:
    return (kept.opened.successor for kept in record.successions) if record is not None else iter(())


def _removal(rule: Rule) -> str:
    words = ["p2pkv trust remove", "'*'" if rule.publisher == ANYBODY else rule.publisher]
    return " ".join(words)


def _key(manifest: Manifest, record: Record) -> Step:
    if record.forked:
        one, two = _named_successors(record)
        error = UntrustedPublisherError(
            f"{record.publisher} named two keys to follow it, {one} and {two}: it is in two hands",
            advice="Ask the publisher by another way which key is right, and run `p2pkv trust add` for that one.",
        )
        return Step(Check.KEY, error.message, error)
    succession = record.succession
    if succession is None:
        return Step(Check.KEY, "the key was not replaced, as far as is known here")
    text = f"the key was replaced by {succession.successor} on {_date(succession.created)}"
    if manifest.sequence > succession.last:
        error = UntrustedPublisherError(
            f"{text}, and this has sequence {manifest.sequence}, above its last one, {succession.last}",
            advice="The old key signs nothing any more: whoever signed this is not the publisher, or used the wrong key.",
        )
        return Step(Check.KEY, error.message, error)
    return Step(Check.KEY, f"{text}; this was signed before that, by its sequence number")


def revoked(record: Record, cid: Cid, model_id: bytes, sequence: int) -> RevokedError | None:
    """Return why the artifact ``cid`` of the record's publisher must not be used, ``None`` where it was not taken back."""
    item = record.revoking(cid, model_id, sequence)
    if item is None:
        return None
    return RevokedError(f"its publisher took it back: {item.reason or 'no reason given'} ({item.scope.value})")


def _revocations(manifest: Manifest, cid: Cid, record: Record) -> Step:
    error = revoked(record, cid, manifest.model_id, manifest.sequence)
    if error is not None:
        return Step(Check.REVOCATIONS, error.message, error)
    if not record.sequence:
        return Step(Check.REVOCATIONS, "no list of revocations of this publisher is known here")
    return Step(Check.REVOCATIONS, f"not taken back in the publisher's list {record.sequence}")


def _expiry(manifest: Manifest, now: float) -> Step:
    if manifest.expires is None:
        return Step(Check.EXPIRY, "does not expire")
    late = now - manifest.expires
    if late > MAX_CLOCK_SKEW_S:
        error = ExpiredError(f"the manifest expired {format_seconds(late)} ago, on {_date(manifest.expires)}")
        return Step(Check.EXPIRY, error.message, error)
    if late > 0:
        return Step(Check.EXPIRY, f"expired {format_seconds(late)} ago, which the {_SKEW} allowed for clocks cover")
    return Step(Check.EXPIRY, f"expires on {_date(manifest.expires)}")


def _clock(manifest: Manifest, now: float) -> Step:
    early = manifest.created - now
    if early > MAX_CLOCK_SKEW_S:
        error = ExpiredError(
            f"the manifest was made {format_seconds(early)} in the future, on {_date(manifest.created)}",
            advice="One of the two clocks is wrong: check yours (`date`).",
        )
        return Step(Check.CLOCK, error.message, error)
    if early > 0:
        return Step(Check.CLOCK, f"made {format_seconds(early)} in the future, within the {_SKEW} allowed for clocks")
    return Step(Check.CLOCK, f"made on {_date(manifest.created)}")


def superseded(manifest: Manifest, newest: int) -> SupersededError | None:
    """Return why another is taken instead of ``manifest`` where both can be had, ``None`` where it is not the older one.

    ``newest`` is the other's sequence number, of the same publisher for the same text and model.
    """
    if newest <= manifest.sequence:
        return None
    return SupersededError(
        f"sequence {manifest.sequence} is older than {newest}, which its publisher signed for the same text"
    )


def _sequence(manifest: Manifest, newest: int | None) -> Step:
    older = superseded(manifest, newest) if newest is not None else None
    if older is not None:
        return Step(Check.SEQUENCE, f"{older.message}: the newer one is used where both can be had")
    return Step(Check.SEQUENCE, f"sequence {manifest.sequence}; none of this publisher for this text is known to be newer")


def _date(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"


_SKEW: Final = format_seconds(MAX_CLOCK_SKEW_S)
