"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
from nacl.signing import SigningKey

from p2pkv.artifact.build import Terms
from p2pkv.artifact.signing import renewed
from p2pkv.artifact.slice import Slice
from p2pkv.client import calls
from p2pkv.client.calls import Call
from p2pkv.client.granted import renew_own_grant
from p2pkv.client.lease import Lease
from p2pkv.client.prefill import PrefillJob
from p2pkv.client.publishing import Staged, stage_artifact
from p2pkv.client.report import Prefill
from p2pkv.client.verification import Level
from p2pkv.errors import P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.limits import TELL_PATIENCE_S
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout, default_home
from p2pkv.store.sequence import sequence_at
from p2pkv.store.staging import open_staging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Listener = Callable[[dict[str, Any]], None]


def ignore(event: dict[str, Any]) -> None:
    """Hear an event and do nothing."""


class Client:
    """Talks to the p2pkv-node that keeps ``home`` (default: ``$P2PKV_HOME``, else the platform's data folder).

    For one thread at a time. Calls raise DaemonUnreachableError where no node answers, but :meth:`prefill` then computes
    locally: it never fails for want of a network.
    """

    def __init__(self, home: Path | str | None = None) -> None:
        self.home = Path(home) if home is not None else default_home()
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to the daemon; the next call opens another."""
        if self._http is not None:
            self._http.close()
            self._http = None

    # --- models --------------------------------------------------------------------------------------------------------

    def prefill(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        *,
        shared: int | None = None,
        patience_s: float = 60.0,
        verify: str = Level.SIGNATURE,
        reader: SigningKey | None = None,
        on_event: Listener = ignore,
    ) -> Prefill:
        """Return a cache for ``token_ids``, loaded from peers as far as it is published and computed locally from there.

        ``shared`` is the length of the part that others share (a document before a question), where the caller knows it.
        ``verify`` says what has to hold beyond hashes, signature and trust before anything is loaded: ``signature`` (nothing
        more), ``sample`` or ``sample=64`` (so many random positions, recomputed, are what was loaded), ``quorum=3`` (so many
        accepted publishers signed the same), ``full`` (everything is what was loaded). What fails is computed locally, and the
        report says why.
        ``reader`` opens what this home was granted, where the home's own key is under a passphrase. ``on_event`` hears the
        daemon's progress. Raises ModelUnsupportedError, UsageError; never for what peers do.
        """
        job = PrefillJob(model, token_ids, home=self.home, shared=shared, patience_s=patience_s, verify=verify, reader=reader)
        while True:
            try:
                for event in self._stream(job.call(), meanwhile=job.prepare):
                    job.handle(event)
                    on_event(event)
            except P2pkvError as error:
                job.fail(error)
                break
            if not job.again():
                break
        prefill = job.finish()
        self._tell(job.told())
        return prefill

    def publish(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        key: SigningKey,
        *,
        model_name: str | None = None,
        licence: str = "",
        expires: int | None = None,
        sequence: int | None = None,
        namespace: bytes | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_event: Listener = ignore,
    ) -> Staged:
        """Compute the KV of ``token_ids``, sign it with ``key`` and let the daemon serve and announce it.

        ``expires`` is in seconds since the epoch. ``sequence`` orders the publisher's manifests: by default the clock gives
        it, :func:`p2pkv.store.sequence.next_sequence` keeps them beside a key file. With a ``namespace`` (32 secret bytes) the
        artifact is private: who may read it is granted afterwards. ``on_progress`` hears of tokens that are computed,
        ``on_event`` how the daemon takes them over. Raises ModelUnsupportedError, UsageError, DiskFullError.
        """
        calls.socket_of(self.home)  # before minutes of computing
        now = time.time()
        number = sequence if sequence is not None else sequence_at(now)
        terms = Terms(encode_did(bytes(key.verify_key)), number, int(now), expires, licence)
        with open_staging(self.home) as staging:
            stage = partial(stage_artifact, model, token_ids, key, terms, staging)
            staged = stage(model_name=model_name, namespace=namespace, on_progress=on_progress)
            if staged.grant is not None:
                GrantFiles(self.home).add(staged.grant.encode())  # before anybody has what nobody could open any more
            self._report(calls.publish(staged.name, staged.manifest), on_event)
        return staged

    def renew(
        self,
        manifest: Cid,
        key: SigningKey,
        *,
        expires: int | None = None,
        sequence: int | None = None,
        on_event: Listener = ignore,
    ) -> Cid:
        """Sign a stored artifact once more, with another expiry, let the daemon share it, and return the new manifest CID.

        Its blocks and its licence stay; nothing is computed. ``expires`` and ``sequence`` are as in :meth:`publish`. Of a
        private one the publisher's grant is made again; readers need new ones as well. Raises NotFoundError,
        FetchIncompleteError where it is not whole, ManifestError for another's key, UsageError for a sequence number that is
        not higher than that of the old manifest, GrantMissingError and GrantError where the publisher's own grant is not here.
        """
        now = time.time()
        number = sequence if sequence is not None else sequence_at(now)
        old = calls.read_envelope(self.artifact(manifest))
        envelope = renewed(old, key, number, int(now), expires)
        if old.open().private:
            renew_own_grant(self.home, manifest, envelope.cid, key, sequence=number, created=int(now))
        with open_staging(self.home) as staging:
            staging.write(envelope.cid, envelope.encode())
            self._report(calls.publish(staging.name, envelope.cid), on_event)
        return envelope.cid

    def announce(self, manifest: Cid) -> int:
        """Announce a stored artifact again now, and return how many keys it has.

        Raises NotFoundError, FetchIncompleteError, RevokedError for one that its publisher took back.
        """
        return int(self._call(calls.announce(manifest))["keys"])

    # --- artifacts -----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        manifest: Cid,
        *,
        segments: int | None = None,
        layers: range | None = None,
        in_order: bool = False,
        patience_s: float = 600.0,
        on_event: Listener = ignore,
    ) -> dict[str, Any]:
        """Let the daemon fetch an artifact, whole or a slice of it, and return its report.

        ``segments``: only so many from the start; ``layers``: only these, one after another. ``on_event`` hears of each
        segment as soon as it is whole, or with ``in_order`` as soon as all before it are whole too. Raises NotFoundError,
        FetchIncompleteError, UsageError for a slice that the artifact has not, and why the artifact was refused.
        """
        return self._report(calls.fetch_manifest(manifest, patience_s, Slice(segments, layers), in_order=in_order), on_event)

    def import_car(self, file: Path, *, on_event: Listener = ignore) -> dict[str, Any]:
        """Let the daemon take over, serve and announce the artifact of a CAR file, and return its report.

        The daemon reads the file; nothing is listed unless all of it is verified. What is here already is not written
        again, so the same call goes on where another was interrupted. Raises UntrustedPublisherError, ExpiredError and what
        :func:`p2pkv.store.car_file.import_car` raises.
        """
        return self._report(calls.import_car(file), on_event)

    def export_car(self, manifest: Cid, file: Path, *, on_event: Listener = ignore) -> dict[str, Any]:
        """Let the daemon write a stored artifact to a CAR file, and return its report.

        It is written beside ``file``, with ``.part`` behind its name, and takes its place when it is complete; the same call
        goes on where another was interrupted. Raises NotFoundError and what :func:`p2pkv.store.car_file.write_car` raises.
        """
        return self._report(calls.export_car(manifest, file), on_event)

    @contextmanager
    def lease(self, manifest: Cid, *, seconds: float = 60.0) -> Iterator[Lease]:
        """Keep a stored, whole artifact from being collected until the end of the block, and tell where its blocks lie.

        The lease is renewed by itself, and ends ``seconds`` after this process. Raises NotFoundError, FetchIncompleteError,
        UsageError; at the end of the block NotFoundError where it was lost meanwhile.
        """
        with Client(self.home) as keeper:
            lease = Lease(keeper._call, HomeLayout(self.home).blocks, manifest, seconds)
            try:
                yield lease
            finally:
                lease.give_back()
        lease.check()

    def artifacts(self) -> list[dict[str, Any]]:
        """Return what the daemon stores, the newest first."""
        found: list[dict[str, Any]] = self._call(calls.ARTIFACTS)["artifacts"]
        return found

    def artifact(self, manifest: Cid) -> dict[str, Any]:
        """Return the envelope (base64) of a stored artifact. Raises NotFoundError."""
        return self._call(calls.artifact(manifest))

    # --- the daemon ----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return addresses, peers, store and transfer figures of the daemon."""
        return self._call(calls.STATUS)

    def stats(self) -> dict[str, Any]:
        """Return the figures that the metrics have too: sums since the start, and what is now."""
        return self._call(calls.STATS)

    def peers(self) -> list[dict[str, Any]]:
        """Return a row for each peer that the daemon knows, the busy ones first."""
        found: list[dict[str, Any]] = self._call(calls.PEERS)["peers"]
        return found

    def trust_list(self) -> list[dict[str, Any]]:
        """Return the rules about publishers, in the order they were added."""
        rules: list[dict[str, Any]] = self._call(calls.TRUST_LIST)["rules"]
        return rules

    def trust_add(self, did: str, note: str = "") -> bool:
        """Trust all that a publisher signs; return whether that is news. Raises UsageError for what is no did:key."""
        return bool(self._call(calls.trust_add(did, note))["added"])

    def trust_remove(self, did: str) -> bool:
        """Take away all rules about a publisher; return whether there were any."""
        return bool(self._call(calls.trust_remove(did))["removed"])

    def pins(self) -> list[dict[str, Any]]:
        """Return all pins: name, manifest, created."""
        found: list[dict[str, Any]] = self._call(calls.PINS)["pins"]
        return found

    def pin(self, name: str, manifest: Cid) -> bool:
        """Keep a stored artifact from being collected, under ``name``; return whether that is news. Raises NotFoundError."""
        return bool(self._call(calls.pin(name, manifest))["added"])

    def unpin(self, name: str, manifest: Cid | None = None) -> int:
        """Take a pin away, or all of that name; return how many there were."""
        return int(self._call(calls.unpin(name, manifest))["removed"])

    def remove(self, manifest: Cid) -> None:
        """Take an artifact off the list; collecting takes its blocks. Raises NotFoundError, UsageError for a pinned one."""
        self._call(calls.remove(manifest))

    def collect(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Collect garbage now, or with ``dry_run`` tell what would go. See :class:`p2pkv.store.collect.Collected`."""
        return self._call(calls.collect(dry_run=dry_run))

    def shutdown(self) -> None:
        """Ask the daemon to end."""
        self._call(calls.SHUTDOWN)

    # --- sending -------------------------------------------------------------------------------------------------------

    def _connection(self) -> httpx.Client:
        if self._http is None:
            transport = httpx.HTTPTransport(uds=str(calls.socket_of(self.home)))
            self._http = httpx.Client(transport=transport, base_url=calls.BASE_URL, timeout=calls.CALL_TIMEOUT)
        return self._http

    @contextmanager
    def _mapped(self) -> Iterator[httpx.Client]:
        try:
            yield self._connection()
        except httpx.TransportError as error:
            self.close()
            raise calls.unreachable(error, self.home) from error

    def _call(self, call: Call) -> dict[str, Any]:
        with self._mapped() as http:
            return calls.read_answer(http.request(call.method, call.path, json=call.body))

    def _report(self, call: Call, on_event: Listener) -> dict[str, Any]:
        """Hear all events of an answer, and return its report."""
        report: dict[str, Any] | None = None
        for event in self._stream(call):
            on_event(event)
            if event["event"] == "report":
                report = event
        if report is None:
            raise calls.no_report()
        return report

    def _tell(self, call: Call | None) -> None:
        """Say what nothing depends on, not even whether a daemon hears it."""
        if call is not None:
            with suppress(P2pkvError), self._mapped() as http:
                http.request(call.method, call.path, json=call.body, timeout=TELL_PATIENCE_S)

    def _stream(self, call: Call, meanwhile: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer; ``meanwhile`` runs when the daemon has begun."""
        with (
            self._mapped() as http,
            http.stream(call.method, call.path, json=call.body, timeout=calls.EVENTS_TIMEOUT) as response,
        ):
            if response.is_error:
                response.read()
                calls.read_answer(response)
            meanwhile()
            for line in response.iter_lines():
                event = calls.read_event(line)
                if event is not None:
                    yield event
