"""What the download engine tells its driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2pkv.formats.cid import Cid


@dataclass(frozen=True, slots=True)
class Ask:
    """Event: send ``cids`` as a want to ``peer``."""

    peer: str
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Event: send ``cids`` as a cancel to ``peer``."""

    peer: str
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: ``cid`` is here, verified; ``peer`` was first to deliver it."""

    cid: Cid
    peer: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Event: ``peer`` lied and is out of this session."""

    peer: str


@dataclass(frozen=True, slots=True)
class Snubbed:
    """Event: ``peer`` was silent too long; its ``blocks`` blocks are asked of others."""

    peer: str
    blocks: int


Event: TypeAlias = Ask | Withdraw | Completed | Dropped | Snubbed


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """One peer's share, for progress displays and reports. ``bytes`` and ``blocks`` are what it was first to deliver."""

    peer: str
    bytes: int
    blocks: int
    outstanding: int
    rate: float
    snubbed: bool
