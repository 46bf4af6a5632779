"""What a fetch is after: the longest published prefix of a prompt, or one artifact by its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from p2pkv import keys
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import Dtype
from p2pkv.routing.boundaries import lookup_keys, query_keys


@dataclass(frozen=True)
class PromptTarget:
    """Fetch the longest published prefix of ``token_ids``; ``shared`` says where the part that others share ends."""

    model_id: bytes
    dtype: Dtype
    token_ids: tuple[int, ...]
    shared: int | None = None
    lookup_keys: Sequence[bytes] = field(init=False)
    query_keys: Sequence[bytes] = field(init=False)
    best_match: int = field(init=False)
    """The longest match there can be, in segments."""

    @property
    def hopeful(self) -> int:
        """How many of the first look-ups are likely to be the last: the shared part's end, else the prompt's two."""
        return 1 if self.shared else 2

    def deadline(self, segment: int) -> int:
        """Return when ``segment`` is needed, before or after others: in its turn."""
        return segment

    def __post_init__(self) -> None:
        chain = keys.chain(self.model_id, self.token_ids)
        shared = keys.chain(self.model_id, self.token_ids[: self.shared]) if self.shared else None
        object.__setattr__(self, "lookup_keys", lookup_keys(chain, shared))
        object.__setattr__(self, "query_keys", query_keys(chain, shared))
        object.__setattr__(self, "best_match", len(list(shared or chain)))


@dataclass(frozen=True)
class ManifestTarget:
    """Fetch the whole artifact that ``manifest`` names."""

    manifest: Cid

    @property
    def lookup_keys(self) -> Sequence[bytes]:
        return [self.manifest.multihash]

    @property
    def query_keys(self) -> Sequence[bytes]:
        return []

    @property
    def best_match(self) -> int:
        return 0

    @property
    def hopeful(self) -> int:
        return 1

    def deadline(self, segment: int) -> int:
        """Return 0: whoever fetches an artifact whole, as a mirror, needs no part of it before another."""
        return 0


Target: TypeAlias = PromptTarget | ManifestTarget
