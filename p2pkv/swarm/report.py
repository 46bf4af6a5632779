"""What a fetch tells while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self, TypeAlias

from p2pkv.artifact.read import Artifact
from p2pkv.download.engine import PeerProgress
from p2pkv.errors import P2pkvError
from p2pkv.formats.cid import Cid


class FetchState(StrEnum):
    """What a fetch is waiting for, in the words that people see."""

    LOOKING_UP = "looking up providers"
    OPENING = "reading the manifest"
    TRANSFERRING = "transferring blocks"
    DISK_FULL = "disk full"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a fetch: sizes in bytes, of the blocks that this fetch has to transfer."""

    state: FetchState
    detail: str
    done_bytes: int
    total_bytes: int
    peers: tuple[PeerProgress, ...]


@dataclass(frozen=True, slots=True)
class Matched:
    """An artifact was opened and accepted; its first ``hit_tokens`` tokens are wanted, in ``segments`` segments."""

    artifact: Artifact
    hit_tokens: int
    segments: int


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """All wanted blocks of segment ``index`` are in the store, verified.

    These are its node, then what the node names of the wanted layers, each once.
    """

    index: int
    blocks: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """Another accepted publisher signed the same text; the ``nodes`` of its first segments are in the store, verified."""

    artifact: Artifact
    nodes: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A manifest that was found and not used, and why (a code of the error tree)."""

    manifest: str
    code: str
    message: str
    advice: str

    @classmethod
    def of(cls, manifest: Cid, error: P2pkvError) -> Self:
        return cls(str(manifest), error.code, error.message, error.advice)


@dataclass(frozen=True, slots=True)
class FetchReport:
    """How a fetch went. Times are seconds from the start of the fetch; ``None`` where it did not come to that.

    ``segments`` are complete from the start of the text in ``layers``, those that were wanted; ``complete`` says whether the
    whole artifact is here. ``bytes_by_peer`` counts blocks and nodes that were used.
    """

    artifact: Artifact | None
    hit_tokens: int
    segments: int
    layers: range | None
    local_bytes: int
    bytes_by_peer: Mapping[str, int]
    rate_by_peer: Mapping[str, float]
    duplicate_bytes: int
    blocks_refused: int
    peers_lost: int
    peers_dropped: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    times: Mapping[str, float] = field(default_factory=dict)
    complete: bool = False


FetchEvent: TypeAlias = Progress | Matched | SegmentReady | Witnessed
