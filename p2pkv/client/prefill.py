"""One prefill: injects what the daemon fetches while it arrives, and computes the rest locally.

The job is fed with the daemon's events by the sync or async client, and does all of its work in the calls it gets. What the
daemon says is not believed: manifest, signature, tokens, geometry, nodes and blocks are checked here again before a byte
reaches the model. A doubt makes the hit shorter; it is never an exception and never a wrong tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_granter
from p2pkv.artifact.read import Artifact, check_model, open_manifest
from p2pkv.artifact.slice import Slice
from p2pkv.client.calls import Call, fetch_manifest, read_locations
from p2pkv.client.granted import find_granted
from p2pkv.client.quorum import Agreement, Quorum
from p2pkv.client.report import Prefill, PrefillReport
from p2pkv.client.verification import Level, Verification, Verify, recompute_all, sample
from p2pkv.errors import CacheMismatchError, IntegrityError, NotFoundError, P2pkvError, PolicyError, UsageError, error_classes
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.keys import encode_tokens
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, SEGMENT_TOKENS
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location, read_located
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.stored_blocks import damaged
from p2pkv.trust.record import succeeded

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

logger = logging.getLogger(__name__)


class PrefillJob:
    """One call of ``prefill``. Send :meth:`call`, :meth:`prepare`, feed each event to :meth:`handle`, take :meth:`finish`.

    Raises ModelUnsupportedError and UsageError at construction, for a model or prompt that cannot be prefilled canonically.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        *,
        home: Path,
        shared: int | None,
        patience_s: float,
        verify: str = Level.SIGNATURE,
        reader: SigningKey | None = None,
    ) -> None:
        from p2pkv.connectors.hf import api as hf  # torch is imported only where a model is in use

        if not token_ids:
            raise UsageError("an empty prompt", advice="Pass the token ids of the prompt, at least one.")
        encode_tokens(token_ids)  # raises for one that is no u32
        if shared is not None and not 0 < shared <= len(token_ids):
            raise UsageError(f"a shared part of {shared} tokens in a prompt of {len(token_ids)}")
        self._verify = Verify.parse(verify)
        if self._verify.level is Level.SAMPLE:
            hf.check_recomputable(model)
        self._hf = hf
        self._started = time.perf_counter()
        self._times: dict[str, float] = {}
        self._model = model
        self._token_ids = tuple(token_ids)
        self._shared = None if shared == len(token_ids) else shared
        self._patience_s = patience_s
        self._folder = HomeLayout(home).blocks
        self._records = StatementFiles(HomeLayout(home).statements)
        self._located: dict[str, Location] = {}
        # Each block is read into the same memory, hashed there and copied from there, while it is in the processor's cache.
        self._block = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
        self._geometry = hf.geometry(model)
        last = hf.last_model_id(model)
        self._model_id = last if last is not None else hf.model_id_of(model)
        self._assumed = last is not None
        self._prepared = False
        self._artifact: Artifact | None = None
        self._buffer: hf.KVBuffer | None = None
        self._spare: hf.KVBuffer | None = None
        self._written: set[int] = set()
        self._fetched: dict[str, Any] = {}
        self._hit = 0
        self._verification: Verification | Agreement | None = None
        self._quorum = Quorum(self._verify.quorum, home) if self._verify.level is Level.QUORUM else None
        self._instead: tuple[Cid, int] | None = None
        self._refused: list[dict[str, str]] = []  # by us, after the daemon had accepted it
        self._miss: str | None = None
        self._tokens_per_s: float | None = None
        self._damaged = self._mended = False
        self._granted: Granted | None = None
        self._withheld: P2pkvError | None = None
        try:
            self._granted = find_granted(home, self._model_id, self._token_ids, time.time(), reader, self._shared)
        except P2pkvError as error:
            self._withheld = error
        if self._quorum is not None and self._granted is not None:
            raise UsageError(
                f"{self._granted.grant.manifest} is private: its digests are keyed, so no two publishers can be compared",
                advice="Use verify=sample or verify=full for what you were granted.",
            )

    def call(self) -> Call:
        """Return what asks the daemon for the prompt, or for the private artifact that gives most of it.

        A prompt that begins as a private text is never looked up by its chain keys: whoever can guess a text can tell by them
        who has it. Raises why there is nothing to ask for in that case.
        """
        self._mark("asked_s")
        if self._withheld is not None:
            raise self._withheld
        if (granted := self._granted) is not None:
            segments = -(-granted.usable_tokens(self._token_ids, self._shared) // SEGMENT_TOKENS)
            if not segments:
                raise NotFoundError(
                    f"the private artifact {granted.grant.manifest} gives no whole segment of the prompt",
                    advice="It is computed here: a private text is not looked up.",
                )
            return fetch_manifest(granted.grant.manifest, self._patience_s, Slice(segments), in_order=False, impatient=True)
        if self._instead is not None:
            manifest, segments = self._instead
            return fetch_manifest(manifest, self._patience_s, Slice(segments), in_order=False, impatient=True)
        body: dict[str, Any] = {
            "model_id": self._model_id.hex(),
            "dtype": self._geometry.dtype.value,
            "token_ids": self._token_ids,
            "shared": self._shared,
            "patience_s": self._patience_s,
        }
        if self._quorum is not None:
            body["quorum"] = self._verify.quorum
        return Call("POST", "/v1/fetch", body)

    def prepare(self) -> None:
        """Look whether the model is still the one that was identified before, and make room. Blocking.

        No byte is injected before it. Reading all weights takes as long as a look-up does, so it is done meanwhile.
        """
        if self._prepared:
            return
        self._prepared = True
        if self._assumed:
            self._model_id = self._hf.model_id_of(self._model)  # what is found for another id is refused by check_model
            self._mark("identified_s")
        if self._shared is not None:
            self._spare = self._hf.KVBuffer.for_model(self._model, self._shared)  # a hit mostly ends there
            self._spare.touch()

    def handle(self, event: dict[str, Any]) -> None:
        """Work one event in: blocking, since it reads files and copies tensors."""
        try:
            self.prepare()
            match event["event"]:
                case "matched":
                    self._located |= read_locations(event)
                    self._open(Cid.parse(event["manifest"]))
                case "segment":
                    self._located |= read_locations(event)
                    self._inject(event["index"])
                case "witness":
                    self._located |= read_locations(event)
                    self._hear_witness(Cid.parse(event["manifest"]))
                case "report":
                    self._fetched = event
                    self._obey(event)
                    self._mark("fetched_s")
                case _:
                    pass
        except P2pkvError as error:
            self.fail(error)

    def fail(self, error: P2pkvError) -> None:
        """Note why there is no hit, or a shorter one. What policy refuses by now is not used, as far as it is here."""
        if isinstance(error, PolicyError):
            self._drop()
        logger.warning("a prefill goes on without what could not be used: %s", error)
        self._miss = str(error)
        self._damaged = self._damaged or isinstance(error, IntegrityError | NotFoundError)

    def again(self) -> bool:
        """Return, after the events of an attempt, whether :meth:`call` has more to ask for; what was injected stays.

        Once for a block that the daemon verified and that was damaged when it was read here: fetching it again mends it. And
        once where a quorum signed other values than those that were found first, so that one liar cannot take it away.
        """
        if self._damaged and not self._mended:
            self._damaged, self._mended = False, True
            return True
        if self._quorum is None or self._instead is not None:
            return False
        self._instead = self._quorum.instead(self._artifact.cid if self._artifact is not None else None)
        return self._instead is not None

    def finish(self) -> Prefill:
        """Compute what was not loaded, but for the last step, and return the cache."""
        hf, model = self._hf, self._model
        self._spare = None  # a miss needs no room
        hit = self._buffer.filled_tokens if self._buffer is not None else 0
        if hit and self._artifact is not None and self._quorum is not None:
            hit = self._count(self._artifact, self._quorum, hit)
        shared = self._shared
        if hit and self._artifact is not None and hit == len(self._artifact.token_ids):
            shared = hit if shared is None else shared
        cache = hf.open_cache(model)
        if hit and self._buffer is not None:
            try:
                cache = self._buffer.to_cache(model, hit)
            except CacheMismatchError as error:
                self.fail(error)
                hit, shared = 0, self._shared
        self._mark("loaded_s")
        start = hit
        if hit and self._artifact is not None and self._verify.level in (Level.SAMPLE, Level.FULL):
            cache, start = self._check_values(self._artifact, cache)
            hit = hit if self._verification is not None and self._verification.passed else 0
            shared = shared if start else self._shared
            self._mark("verified_s")
        steps = hf.canonical_steps(len(self._token_ids), start=start, shared=shared)
        if len(steps) > 1:
            pace = hf.Pace(model, steps[:-1])
            hf.prefill(model, self._token_ids, cache, steps[:-1], pace)
            self._tokens_per_s = pace.tokens_per_s
        self._mark("done_s")
        self._hit = hit
        return Prefill(cache, steps[-1][0], self._report(hit), {hf.cache_argument(model): cache})

    def told(self) -> Call | None:
        """After :meth:`finish`: return what tells the daemon how it went, ``None`` where there was no daemon to fetch."""
        if not self._fetched:
            return None
        body = {
            "model_id": self._model_id.hex(),
            "device": self._model.device.type,
            "hit_tokens": self._hit,
            "loading_s": self._times.get("verified_s", self._times["loaded_s"]),
            "tokens_per_s": self._tokens_per_s,
        }
        return Call("POST", "/v1/prefills", body)

    # --- injection -----------------------------------------------------------------------------------------------------

    def _obey(self, report: dict[str, Any]) -> None:
        """Drop an artifact that the daemon has refused while it came: its publisher took it back meanwhile."""
        for refusal in report.get("refusals", []):
            policy = issubclass(error_classes().get(refusal["code"], P2pkvError), PolicyError)
            if policy and self._artifact is not None and refusal["manifest"] == str(self._artifact.cid):
                self._drop()

    def _drop(self) -> None:
        self._artifact = self._buffer = None
        self._written.clear()

    def _open(self, cid: Cid) -> None:
        """Check the manifest as if nobody had, and make room for what it offers."""
        if self._artifact is not None and self._artifact.cid == cid:
            return
        self._drop()
        manifest = Envelope.decode(bytes(self._read(cid))).open()
        token_block = self._checked_tokens(manifest)
        key: bytes | None = None
        if self._granted is not None and self._granted.grant.manifest == cid:
            check_granter(self._granted.grant, manifest, [*succeeded(manifest.publisher, self._records)])
            key = self._granted.artifact_key
        artifact = open_manifest(cid, manifest, token_block, artifact_key=key)
        if self._quorum is not None:
            self._quorum.hear(artifact)
        hit = artifact.usable_prefix(self._token_ids, self._shared)
        if hit:
            self._artifact = artifact
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.tokens == hit
            self._buffer = spare if fits else self._hf.KVBuffer.for_model(self._model, hit)
            self._mark("matched_s")

    def _checked_tokens(self, manifest: Manifest) -> bytes | None:
        """Return the block of token ids where the manifest, which has to be of this model, has one."""
        check_model(manifest, self._model_id, self._geometry.dtype)
        if manifest.layers != self._geometry.layers:
            raise CacheMismatchError(f"the layers of {manifest.model_name[:64]!r} are not those of this model")
        return bytes(self._read(manifest.tokens.cid)) if manifest.tokens.cid is not None else None

    def _inject(self, index: int) -> None:
        """Copy one segment's blocks into the buffer, each verified on the way."""
        artifact, buffer = self._artifact, self._buffer
        if artifact is None or buffer is None or index in self._written:
            return
        if index >= len(artifact.manifest.segments):
            raise CacheMismatchError(f"there is no segment {index} in {artifact.cid}")
        segment = artifact.open_segment(index, bytes(self._read(artifact.manifest.segments[index])))
        if segment.end > buffer.tokens:
            raise CacheMismatchError(f"segment {index} goes beyond the {buffer.tokens} tokens that the prompt shares")
        for layer, blocks in enumerate(segment.layers):
            for block in blocks:
                data = artifact.decode_block(index, layer, block, self._read(block.cid))
                buffer.write(layer, block.part, segment.start, segment.end, data)
        if self._quorum is not None:
            self._quorum.note(artifact.cid, index, segment)
        self._written.add(index)
        self._mark("first_segment_s")

    def _hear_witness(self, cid: Cid) -> None:
        """Take what another publisher signed, checked as if nobody had. A doubt about it is its own loss and nobody else's."""
        quorum = self._quorum
        if quorum is None:
            return
        try:
            manifest = Envelope.decode(bytes(self._read(cid))).open()
            artifact = open_manifest(cid, manifest, self._checked_tokens(manifest))
            wanted = artifact.segments_for(artifact.usable_prefix(self._token_ids, self._shared))
            nodes = {index: node for index, node in enumerate(manifest.segments[:wanted]) if str(node) in self._located}
            opened = {index: artifact.open_segment(index, bytes(self._read(node))) for index, node in nodes.items()}
            quorum.hear(artifact)
            for index, segment in opened.items():
                quorum.note(cid, index, segment)
        except P2pkvError as error:
            logger.warning("a witness is not heard: %s", error)
            self._refuse(cid, error)

    def _count(self, artifact: Artifact, quorum: Quorum, loaded: int) -> int:
        """Return how many of the tokens that were loaded a quorum signed alike."""
        found = self._verification = quorum.count(artifact.cid, loaded)
        if not found.passed:
            error = found.error()
            self.fail(error)
            self._refuse(artifact.cid, error)
        return found.positions

    def _refuse(self, cid: Cid, error: P2pkvError) -> None:
        self._refused.append({"manifest": str(cid), "code": error.code, "message": error.message, "advice": error.advice})

    def _check_values(self, artifact: Artifact, cache: DynamicCache) -> tuple[DynamicCache, int]:
        """Verify what was loaded beyond its signature; return the cache to go on with, and how many tokens it holds."""
        loaded = cache.get_seq_length()
        computed: DynamicCache | None = None
        if self._verify.level is Level.SAMPLE:
            found = sample(self._model, self._token_ids, cache, artifact, self._verify.positions)
        else:
            found, computed = recompute_all(self._model, self._token_ids, cache, artifact)
        self._verification = found
        if found.passed:
            return cache, loaded
        error = found.error()
        self.fail(error)
        self._refuse(artifact.cid, error)
        return (computed, loaded) if computed is not None else (self._hf.open_cache(self._model), 0)

    def _read(self, cid: Cid) -> memoryview:
        """Return the verified bytes of a block, good until the next call. Raises NotFoundError, IntegrityError, StoreError."""
        location = self._located.get(str(cid))
        if location is None:
            raise NotFoundError(f"the daemon does not have block {cid} any more", advice="It is fetched again.")
        data = read_located(self._folder, location, self._block)
        if not cid.matches(data):
            raise damaged(cid)
        return data

    # --- telling -------------------------------------------------------------------------------------------------------

    def _mark(self, name: str) -> None:
        self._times.setdefault(name, time.perf_counter() - self._started)

    def _report(self, hit: int) -> PrefillReport:
        fetched = self._fetched
        refusals = [*fetched.get("refusals", []), *self._refused]
        miss = self._miss
        if miss is None and refusals:
            miss = "{message} [{code}] {advice}".format_map(refusals[0])
        elif miss is None and fetched.get("manifest"):
            miss = f"{fetched['manifest']} was found, but not one whole segment of it could be fetched"
        asked = self._times["asked_s"]
        network = {f"fetch_{name}": asked + seconds for name, seconds in fetched.get("times", {}).items()}
        return PrefillReport(
            prompt_tokens=len(self._token_ids),
            hit_tokens=hit,
            manifest=str(self._artifact.cid) if hit and self._artifact is not None else None,
            miss=None if hit else miss,
            bytes_by_peer=fetched.get("bytes_by_peer", {}),
            rate_by_peer=fetched.get("rate_by_peer", {}),
            local_bytes=fetched.get("local_bytes", 0),
            blocks_refused=fetched.get("blocks_refused", 0),
            peers_lost=fetched.get("peers_lost", 0),
            peers_dropped=tuple(fetched.get("peers_dropped", ())),
            refusals=tuple(refusals),
            tokens_per_s=self._tokens_per_s,
            verification=self._verification,
            times={**self._times, **network},
        )
