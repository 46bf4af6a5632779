"""What a fetch is after: the longest published prefix of a prompt, or an artifact, or a slice of it, by its manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

from p2pkv import keys
from p2pkv.artifact.assembly import Assembly
from p2pkv.artifact.read import Artifact, check_model
from p2pkv.artifact.slice import WHOLE, Slice
from p2pkv.errors import NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_SEGMENTS
from p2pkv.routing.boundaries import lookup_keys, query_keys

# When nodes are needed: before all blocks, since they tell which blocks there are, and the manifest before them.
NODE_DEADLINE: Final = -MAX_SEGMENTS - 1
MANIFEST_DEADLINE: Final = NODE_DEADLINE - 1


@dataclass(frozen=True)
class PromptTarget:
    """Fetch the longest published prefix of ``token_ids``; ``shared`` says where the part that others share ends.

    ``in_order``: a segment is handed over when all before it are complete as well, not as soon as it is itself.
    """

    model_id: bytes
    dtype: Dtype
    token_ids: tuple[int, ...]
    shared: int | None = None
    in_order: bool = False
    impatient: bool = field(init=False, default=True)
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

    def check(self, manifest: Manifest) -> None:
        """Raise WrongDtypeError or WrongModelError unless the manifest is of the prompt's model."""
        check_model(manifest, self.model_id, self.dtype)

    def assemble(self, artifact: Artifact) -> Assembly:
        """Begin with what the prompt can use of ``artifact``. Raises NotFoundError where that is nothing."""
        hit = artifact.usable_prefix(self.token_ids, self.shared)
        if hit == 0:
            raise NotFoundError("the artifact shares no whole segment with the prompt")
        return Assembly(artifact, hit, in_order=self.in_order)

    def __post_init__(self) -> None:
        chain = keys.chain(self.model_id, self.token_ids)
        shared = keys.chain(self.model_id, self.token_ids[: self.shared]) if self.shared else None
        object.__setattr__(self, "lookup_keys", lookup_keys(chain, shared))
        object.__setattr__(self, "query_keys", query_keys(chain, shared))
        object.__setattr__(self, "best_match", len(list(shared or chain)))


@dataclass(frozen=True)
class WitnessTarget(PromptTarget):
    """Find one more publisher of a prompt: manifest and nodes, which tell all digests, and none of the blocks.

    ``counted`` says of a publisher (did:key) whether it was heard already.
    """

    counted: Callable[[str], bool] = field(kw_only=True)

    @classmethod
    def of(cls, target: PromptTarget, counted: Callable[[str], bool]) -> Self:
        return cls(target.model_id, target.dtype, target.token_ids, target.shared, counted=counted)

    def check(self, manifest: Manifest) -> None:
        """Raise as for the prompt; NotFoundError for a publisher that was heard already."""
        super().check(manifest)
        if self.counted(manifest.publisher):
            raise NotFoundError(f"{manifest.publisher} was heard already")

    def assemble(self, artifact: Artifact) -> Assembly:
        """Begin with the nodes of what the prompt can use. Raises as for the prompt."""
        hit = super().assemble(artifact).hit_tokens
        return Assembly(artifact, hit, layers=range(0))


@dataclass(frozen=True)
class ManifestTarget:
    """Fetch the artifact that ``manifest`` names, or the slice of it that is ``wanted``; ``in_order`` as for a prompt.

    ``impatient``: somebody who could compute as well waits for it, and not for peers that are all silent.
    """

    manifest: Cid
    wanted: Slice = WHOLE
    in_order: bool = False
    impatient: bool = False

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
        """Return when ``segment`` is needed: in its turn where it is handed over so, else none before another."""
        return segment if self.in_order else 0

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError where the artifact has not as many segments or layers as are wanted."""
        self.wanted.check(manifest)

    def assemble(self, artifact: Artifact) -> Assembly:
        """Begin with what is wanted of ``artifact``."""
        tokens = self.wanted.token_count(artifact.manifest)
        return Assembly(artifact, tokens, layers=self.wanted.layers, in_order=self.in_order)


Target: TypeAlias = PromptTarget | ManifestTarget
