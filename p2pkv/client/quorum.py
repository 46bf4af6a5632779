"""``verify=quorum=k``: only what k publishers signed alike is loaded.

Nothing is recomputed. Who signed what is read here from manifests and nodes, verified as if nobody had; a daemon only says
where they lie. Values are compared by the digests of their decoded bytes, which loading checks block by block.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from p2pkv.artifact.read import Artifact
from p2pkv.client.verification import Level
from p2pkv.errors import QuorumError
from p2pkv.formats.cid import Cid
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import BlockPart
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust

Values: TypeAlias = tuple[bytes, int, int, tuple[tuple[tuple[BlockPart, bytes], ...], ...]]
Range: TypeAlias = tuple[int, int]
# Of a stack that a publisher names, in a sentence for people.
_STACK_CHARS: Final = 200


def values_of(segment: Segment) -> Values:
    """Return what tells the KV values of a segment: equal of two where all their decoded bytes and their place are."""
    layers = tuple(tuple((ref.part, ref.digest) for ref in layer) for layer in segment.layers)
    return segment.chain_key, segment.start, segment.end, layers


@dataclass(frozen=True, slots=True)
class Witness:
    """What another accepted publisher signed of the tokens that the artifact in question gives.

    ``agrees`` and ``disagrees`` are ranges of tokens ``[start, end)``; of those in neither it signed nothing that ends where
    the artifact's segments do. ``other_stack`` is what in the stack that it names is not as the artifact's publisher has it:
    other stacks give other last bits.
    """

    publisher: str
    manifest: str
    agrees: tuple[Range, ...]
    disagrees: tuple[Range, ...]
    other_stack: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return it for people."""
        said = [f"{verb} tokens {_text(ranges)}" for verb, ranges in self._verdicts if ranges]
        stack = ", ".join(f"{name} {value or 'unnamed'}" for name, value in self.other_stack.items())
        text = f"{self.publisher} {' and '.join(said) or 'signed no segment that ends where these do'}"
        return f"{text} (on another stack: {stack[:_STACK_CHARS]})" if stack else text

    @property
    def _verdicts(self) -> tuple[tuple[str, tuple[Range, ...]], ...]:
        return ("agrees on", self.agrees), ("disagrees on", self.disagrees)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Who signed the KV values of an artifact's first tokens alike.

    ``publisher`` is the artifact's, ``positions`` how many tokens from the start the ``quorum`` signed; those alone are
    loaded. ``publishers`` is how many signed these alike at least, or the first segment where it is too few.
    """

    level: Level
    passed: bool
    publisher: str
    positions: int
    quorum: int
    publishers: int
    witnesses: tuple[Witness, ...]

    def __str__(self) -> str:
        """Return what was found, for people."""
        heard = "; ".join(map(str, self.witnesses))
        return f"verified by {self.level}: {self.publishers} publishers signed {self.positions:,} tokens alike: {heard}"

    def error(self) -> QuorumError:
        """Return why nothing of it is used."""
        heard = f": {'; '.join(map(str, self.witnesses))}" if self.witnesses else ", and no other accepted one was found"
        return QuorumError(
            f"of the {self.quorum} publishers that have to agree {self.publishers} signed what {self.publisher} did{heard}"
        )


@dataclass(frozen=True, slots=True)
class _Signed:
    """An artifact whose publisher is accepted, who that is by now, and the values of the segments whose nodes were read."""

    artifact: Artifact
    holder: str
    segments: dict[int, Values] = field(default_factory=dict)


class Quorum:
    """Hears artifacts, and counts whose values are the same. ``wanted`` publishers make a quorum, under the rules of ``home``.

    A key and the one that follows it are one publisher, and each has one voice: its first artifact that is heard.
    """

    def __init__(self, wanted: int, home: Path) -> None:
        self._wanted = wanted
        self._trust = HomeTrust(HomeLayout(home))
        self._heard: dict[Cid, _Signed] = {}

    def hear(self, artifact: Artifact) -> None:
        """Take an artifact that is opened and verified. Raises PolicyError where the rules refuse it, StoreError."""
        if artifact.cid not in self._heard:
            manifest = artifact.manifest
            self._trust.judge(manifest, artifact.cid, time.time()).require()
            self._heard[artifact.cid] = _Signed(artifact, self._trust.holder(manifest.publisher))

    def note(self, manifest: Cid, index: int, segment: Segment) -> None:
        """Take a segment of an artifact that was heard, as its node tells it."""
        self._heard[manifest].segments[index] = values_of(segment)

    def count(self, manifest: Cid, loaded: int) -> Agreement:
        """Return who signed the first ``loaded`` tokens of an artifact that was heard."""
        own = self._heard[manifest]
        others = self._others(own)
        wanted = [values for _, values in sorted(own.segments.items()) if values[2] <= loaded]
        agreed = min(self._agreed(own, others), len(wanted))
        counts = [_voices(values, index, others) for index, values in enumerate(wanted[: agreed or 1])]
        positions = wanted[agreed - 1][2] if agreed else 0
        return Agreement(
            Level.QUORUM,
            positions > 0,
            own.artifact.manifest.publisher,
            positions,
            self._wanted,
            min(counts, default=1),
            tuple(_witness(own, other, wanted) for other in others),
        )

    def instead(self, manifest: Cid | None) -> tuple[Cid, int] | None:
        """Return the artifact of which a quorum signed most and how many segments, where that is more than of ``manifest``."""
        most = self._agreed_of(self._heard[manifest]) if manifest in self._heard else 0
        best = max(self._heard.values(), key=self._agreed_of, default=None)
        if best is None or (agreed := self._agreed_of(best)) <= most:
            return None
        return best.artifact.cid, agreed

    def _agreed_of(self, own: _Signed) -> int:
        return self._agreed(own, self._others(own))

    def _agreed(self, own: _Signed, others: list[_Signed]) -> int:
        """Return how many segments from the start a quorum signed, the publisher of ``own`` included."""
        index = 0
        while (values := own.segments.get(index)) is not None and _voices(values, index, others) >= self._wanted:
            index += 1
        return index

    def _others(self, own: _Signed) -> list[_Signed]:
        found: dict[str, _Signed] = {}
        for signed in self._heard.values():
            if signed.holder != own.holder:
                found.setdefault(signed.holder, signed)
        return list(found.values())


def _voices(values: Values, index: int, others: Iterable[_Signed]) -> int:
    return 1 + sum(other.segments.get(index) == values for other in others)


def _witness(own: _Signed, other: _Signed, wanted: list[Values]) -> Witness:
    verdicts: list[tuple[bool, Range]] = []
    for index, values in enumerate(wanted):
        theirs = other.segments.get(index)
        if theirs is not None and theirs[:3] == values[:3]:
            verdicts.append((theirs == values, values[1:3]))
    mine, stack = own.artifact.manifest.producer, other.artifact.manifest.producer
    return Witness(
        other.artifact.manifest.publisher,
        str(other.artifact.cid),
        _joined(span for same, span in verdicts if same),
        _joined(span for same, span in verdicts if not same),
        {name: stack.get(name, "") for name in sorted(mine.keys() | stack.keys()) if mine.get(name) != stack.get(name)},
    )


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges with those joined that lie beside each other."""
    found: list[Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return tuple(found)


def _text(ranges: Iterable[Range]) -> str:
    return ", ".join(f"{start:,} to {end:,}" for start, end in ranges)
