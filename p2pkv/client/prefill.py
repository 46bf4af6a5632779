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
from p2pkv.client.report import Prefill, PrefillReport
from p2pkv.client.verification import Level, Verification, Verify, recompute_all, sample
from p2pkv.errors import CacheMismatchError, IntegrityError, NotFoundError, P2pkvError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.keys import encode_tokens
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, SEGMENT_TOKENS
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location, read_located
from p2pkv.store.stored_blocks import damaged

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
        self._verification: Verification | None = None
        self._refused: list[dict[str, str]] = []  # by us, after the daemon had accepted it
        self._miss: str | None = None
        self._tokens_per_s: float | None = None
        self.damaged = False
        """A block that the daemon verified was damaged when it was read here: fetching again will mend it."""
        self._granted: Granted | None = None
        self._withheld: P2pkvError | None = None
        try:
            self._granted = find_granted(home, self._model_id, self._token_ids, time.time(), reader)
        except P2pkvError as error:
            self._withheld = error

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
        body = {
            "model_id": self._model_id.hex(),
            "dtype": self._geometry.dtype.value,
            "token_ids": self._token_ids,
            "shared": self._shared,
            "patience_s": self._patience_s,
        }
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
                case "report":
                    self._fetched = event
                    self._mark("fetched_s")
                case _:
                    pass
        except P2pkvError as error:
            self.fail(error)

    def fail(self, error: P2pkvError) -> None:
        """Note why there is no hit, or a shorter one."""
        logger.warning("a prefill goes on without what could not be used: %s", error)
        self._miss = str(error)
        self.damaged = self.damaged or isinstance(error, IntegrityError | NotFoundError)

    def retry(self) -> None:
        """Begin to hear the events of a second attempt; what was injected stays."""
        self.damaged = False

    def finish(self) -> Prefill:
        """Compute what was not loaded, but for the last step, and return the cache."""
        hf, model = self._hf, self._model
        self._spare = None  # a miss needs no room
        hit = self._buffer.filled_tokens if self._buffer is not None else 0
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
        if hit and self._artifact is not None and self._verify.level is not Level.SIGNATURE:
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

    def _open(self, cid: Cid) -> None:
        """Check the manifest as if nobody had, and make room for what it offers."""
        if self._artifact is not None and self._artifact.cid == cid:
            return
        self._artifact = self._buffer = None
        self._written.clear()
        manifest = Envelope.decode(bytes(self._read(cid))).open()
        check_model(manifest, self._model_id, self._geometry.dtype)
        if manifest.layers != self._geometry.layers:
            raise CacheMismatchError(f"the layers of {manifest.model_name[:64]!r} are not those of this model")
        token_block = bytes(self._read(manifest.tokens.cid)) if manifest.tokens.cid is not None else None
        key: bytes | None = None
        if self._granted is not None and self._granted.grant.manifest == cid:
            check_granter(self._granted.grant, manifest)
            key = self._granted.artifact_key
        artifact = open_manifest(cid, manifest, token_block, artifact_key=key)
        hit = artifact.usable_prefix(self._token_ids, self._shared)
        if hit:
            self._artifact = artifact
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.tokens == hit
            self._buffer = spare if fits else self._hf.KVBuffer.for_model(self._model, hit)
            self._mark("matched_s")

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
        self._written.add(index)
        self._mark("first_segment_s")

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
        self._refused.append(
            {"manifest": str(artifact.cid), "code": error.code, "message": error.message, "advice": error.advice}
        )
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
