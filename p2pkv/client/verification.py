"""What a consumer can ask for beyond a publisher's signature: that the KV values are those of the model (``verify=``)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from p2pkv.artifact.read import Artifact
from p2pkv.errors import UsageError, WrongValuesError
from p2pkv.limits import MAX_QUORUM, MAX_SAMPLED_POSITIONS
from p2pkv.trust.spot_check import SpotCheck, draw_positions

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

DEFAULT_POSITIONS: Final = 32
DEFAULT_QUORUM: Final = 2


class Level(StrEnum):
    """How far loaded KV is checked; each level includes ``signature``: hashes, signature, trust and the model's identity."""

    SIGNATURE = "signature"
    SAMPLE = "sample"
    QUORUM = "quorum"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Verify:
    """A level; for ``sample`` how many token positions are recomputed, for ``quorum`` how many publishers have to agree."""

    level: Level = Level.SIGNATURE
    positions: int = DEFAULT_POSITIONS
    quorum: int = DEFAULT_QUORUM

    @classmethod
    def parse(cls, text: str) -> Verify:
        """Read ``signature``, ``sample``, ``sample=64``, ``quorum``, ``quorum=3`` or ``full``. Raises UsageError."""
        match re.fullmatch(r"(signature|sample|quorum|full)(?:=([0-9]{1,6}))?", text):
            case re.Match() as found if found[2] is None:
                return cls(Level(found[1]))
            case re.Match() as found if found[1] == Level.SAMPLE and 1 <= int(found[2]) <= MAX_SAMPLED_POSITIONS:
                return cls(Level.SAMPLE, positions=int(found[2]))
            case re.Match() as found if found[1] == Level.QUORUM and 2 <= int(found[2]) <= MAX_QUORUM:
                return cls(Level.QUORUM, quorum=int(found[2]))
        raise UsageError(
            f"{text[:64]!r} is no way to verify",
            advice=f"Say signature, sample, sample=N with N from 1 to {MAX_SAMPLED_POSITIONS}, quorum=K with K from 2 to "
            f"{MAX_QUORUM}, or full.",
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification beyond the signature found.

    ``publisher`` is who signed, ``positions`` how many tokens were compared, ``check`` the numbers; without
    numbers all of them were equal bit for bit.
    """

    level: Level
    passed: bool
    publisher: str
    positions: int
    check: SpotCheck | None = None

    def __str__(self) -> str:
        """Return what was found, for people."""
        found = "all equal, bit for bit" if self.check is None else str(self.check)
        return f"verified by {self.level} at {self.positions:,} tokens: {found}"

    def error(self) -> WrongValuesError:
        """Return why nothing of it is used."""
        return WrongValuesError(
            f"{self.publisher} signed KV values that this model does not compute: {self.check}",
            advice="Nothing of it was used, and the prefill is computed here. Tell the publisher; if its next artifact is no "
            f"better, run `p2pkv trust remove {self.publisher}`.",
        )


def sample(
    model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache, artifact: Artifact, positions: int
) -> Verification:
    """Recompute so many positions of ``cache``, drawn now and by nobody else, over what was loaded before each."""
    from p2pkv.connectors.hf import api as hf

    drawn = draw_positions(cache.get_seq_length(), positions, secrets.SystemRandom())
    manifest = artifact.manifest
    check = hf.spot_check(model, token_ids, cache, drawn, manifest.producer)
    return Verification(Level.SAMPLE, check.passed, manifest.publisher, len(drawn), check)


def recompute_all(
    model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache, artifact: Artifact
) -> tuple[Verification, DynamicCache]:
    """Compute what ``cache`` holds in the publisher's steps and compare all of it; return what was computed, too."""
    from p2pkv.connectors.hf import api as hf

    tokens = cache.get_seq_length()
    computed: Any = hf.open_cache(model)
    hf.prefill(model, token_ids[:tokens], computed, hf.canonical_steps(tokens))
    manifest = artifact.manifest
    check = hf.compare_caches(model, cache, computed, manifest.producer)
    return Verification(Level.FULL, check is None or check.passed, manifest.publisher, tokens, check), computed
