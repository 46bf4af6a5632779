"""The asynchronous client, for asyncio and trio alike (anyio). Model work and file reads run in worker threads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio.to_thread
import httpx
from nacl.signing import SigningKey

from p2pkv.artifact.slice import Slice
from p2pkv.client import calls
from p2pkv.client.calls import Call
from p2pkv.client.lease import Lease
from p2pkv.client.prefill import PrefillJob
from p2pkv.client.publishing import Staged
from p2pkv.client.report import Prefill
from p2pkv.client.sync import Client, Listener, ignore
from p2pkv.client.verification import Level
from p2pkv.errors import P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.limits import TELL_PATIENCE_S
from p2pkv.store.home import HomeLayout, default_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AsyncClient:
    """The calls of :class:`p2pkv.client.sync.Client`, awaited; see there. For one task at a time."""

    def __init__(self, home: Path | str | None = None) -> None:
        self.home = Path(home) if home is not None else default_home()
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection to the daemon; the next call opens another."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    # --- models --------------------------------------------------------------------------------------------------------

    async def prefill(
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
        """Return a cache for ``token_ids``; see :meth:`Client.prefill`. The model must not be used meanwhile."""
        run = anyio.to_thread.run_sync
        make = partial(PrefillJob, home=self.home, shared=shared, patience_s=patience_s, verify=verify, reader=reader)
        job = await run(partial(make, model, token_ids))
        while True:
            try:
                async with aclosing(self._stream(job.call())) as events:
                    async for event in events:
                        await run(job.handle, event)
                        on_event(event)
            except P2pkvError as error:
                job.fail(error)
                break
            if not job.again():
                break
        prefill = await run(job.finish)
        await self._tell(job.told())
        return prefill

    async def publish(
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
        """Compute, sign and publish; see :meth:`Client.publish`. A worker thread calls ``on_progress`` and ``on_event``."""

        def work() -> Staged:
            with Client(self.home) as client:
                return client.publish(
                    model,
                    token_ids,
                    key,
                    model_name=model_name,
                    licence=licence,
                    expires=expires,
                    sequence=sequence,
                    namespace=namespace,
                    on_progress=on_progress,
                    on_event=on_event,
                )

        return await anyio.to_thread.run_sync(work)

    async def renew(
        self,
        manifest: Cid,
        key: SigningKey,
        *,
        expires: int | None = None,
        sequence: int | None = None,
        on_event: Listener = ignore,
    ) -> Cid:
        """Sign once more and share; see :meth:`Client.renew`. A worker thread calls ``on_event``."""

        def work() -> Cid:
            with Client(self.home) as client:
                return client.renew(manifest, key, expires=expires, sequence=sequence, on_event=on_event)

        return await anyio.to_thread.run_sync(work)

    async def announce(self, manifest: Cid) -> int:
        """Announce a stored artifact again now, and return how many keys it has; see :meth:`Client.announce`."""
        return int((await self._call(calls.announce(manifest)))["keys"])

    # --- artifacts -----------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        manifest: Cid,
        *,
        segments: int | None = None,
        layers: range | None = None,
        in_order: bool = False,
        patience_s: float = 600.0,
        on_event: Listener = ignore,
    ) -> dict[str, Any]:
        """Let the daemon fetch an artifact, whole or a slice of it, and return its report; see :meth:`Client.fetch`."""
        call = calls.fetch_manifest(manifest, patience_s, Slice(segments, layers), in_order=in_order)
        return await self._report(call, on_event)

    async def import_car(self, file: Path, *, on_event: Listener = ignore) -> dict[str, Any]:
        """Let the daemon take over the artifact of a CAR file; see :meth:`Client.import_car`."""
        return await self._report(calls.import_car(file), on_event)

    async def export_car(self, manifest: Cid, file: Path, *, on_event: Listener = ignore) -> dict[str, Any]:
        """Let the daemon write an artifact to a CAR file; see :meth:`Client.export_car`."""
        return await self._report(calls.export_car(manifest, file), on_event)

    @asynccontextmanager
    async def lease(self, manifest: Cid, *, seconds: float = 60.0) -> AsyncIterator[Lease]:
        """Keep an artifact where it is until the end of the block; see :meth:`Client.lease`. Mapping reads the disk."""
        with Client(self.home) as keeper:
            folder = HomeLayout(self.home).blocks
            lease = await anyio.to_thread.run_sync(partial(Lease, keeper._call, folder, manifest, seconds))
            try:
                yield lease
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(lease.give_back)
        lease.check()

    async def artifacts(self) -> list[dict[str, Any]]:
        """Return what the daemon stores, the newest first."""
        found: list[dict[str, Any]] = (await self._call(calls.ARTIFACTS))["artifacts"]
        return found

    async def artifact(self, manifest: Cid) -> dict[str, Any]:
        """Return the envelope (base64) of a stored artifact. Raises NotFoundError."""
        return await self._call(calls.artifact(manifest))

    # --- the daemon ----------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return addresses, peers, store and transfer figures of the daemon."""
        return await self._call(calls.STATUS)

    async def stats(self) -> dict[str, Any]:
        """Return the figures that the metrics have too: sums since the start, and what is now."""
        return await self._call(calls.STATS)

    async def peers(self) -> list[dict[str, Any]]:
        """Return a row for each peer that the daemon knows, the busy ones first."""
        found: list[dict[str, Any]] = (await self._call(calls.PEERS))["peers"]
        return found

    async def trust_list(self) -> list[dict[str, Any]]:
        """Return the rules about publishers, in the order they were added."""
        rules: list[dict[str, Any]] = (await self._call(calls.TRUST_LIST))["rules"]
        return rules

    async def trust_add(self, did: str, note: str = "") -> bool:
        """Trust all that a publisher signs; return whether that is news. Raises UsageError for what is no did:key."""
        return bool((await self._call(calls.trust_add(did, note)))["added"])

    async def trust_remove(self, did: str) -> bool:
        """Take away all rules about a publisher; return whether there were any."""
        return bool((await self._call(calls.trust_remove(did)))["removed"])

    async def pins(self) -> list[dict[str, Any]]:
        """Return all pins: name, manifest, created."""
        found: list[dict[str, Any]] = (await self._call(calls.PINS))["pins"]
        return found

    async def pin(self, name: str, manifest: Cid) -> bool:
        """Keep a stored artifact from being collected, under ``name``; return whether that is news. Raises NotFoundError."""
        return bool((await self._call(calls.pin(name, manifest)))["added"])

    async def unpin(self, name: str, manifest: Cid | None = None) -> int:
        """Take a pin away, or all of that name; return how many there were."""
        return int((await self._call(calls.unpin(name, manifest)))["removed"])

    async def remove(self, manifest: Cid) -> None:
        """Take an artifact off the list; collecting takes its blocks. Raises NotFoundError, UsageError for a pinned one."""
        await self._call(calls.remove(manifest))

    async def collect(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Collect garbage now, or with ``dry_run`` tell what would go. See :class:`p2pkv.store.collect.Collected`."""
        return await self._call(calls.collect(dry_run=dry_run))

    async def shutdown(self) -> None:
        """Ask the daemon to end."""
        await self._call(calls.SHUTDOWN)

    # --- sending -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _mapped(self) -> AsyncIterator[httpx.AsyncClient]:
        try:
            if self._http is None:
                transport = httpx.AsyncHTTPTransport(uds=str(calls.socket_of(self.home)))
                self._http = httpx.AsyncClient(transport=transport, base_url=calls.BASE_URL, timeout=calls.CALL_TIMEOUT)
            yield self._http
        except httpx.TransportError as error:
            await self.aclose()
            raise calls.unreachable(error, self.home) from error

    async def _call(self, call: Call) -> dict[str, Any]:
        async with self._mapped() as http:
            return calls.read_answer(await http.request(call.method, call.path, json=call.body))

    async def _report(self, call: Call, on_event: Listener) -> dict[str, Any]:
        """Hear all events of an answer, and return its report."""
        report: dict[str, Any] | None = None
        async with aclosing(self._stream(call)) as events:
            async for event in events:
                on_event(event)
                if event["event"] == "report":
                    report = event
        if report is None:
            raise calls.no_report()
        return report

    async def _tell(self, call: Call | None) -> None:
        """Say what nothing depends on, not even whether a daemon hears it."""
        if call is not None:
            with suppress(P2pkvError):
                async with self._mapped() as http:
                    await http.request(call.method, call.path, json=call.body, timeout=TELL_PATIENCE_S)

    async def _stream(self, call: Call) -> AsyncGenerator[dict[str, Any], None]:
        async with (
            self._mapped() as http,
            http.stream(call.method, call.path, json=call.body, timeout=calls.EVENTS_TIMEOUT) as response,
        ):
            if response.is_error:
                await response.aread()
                calls.read_answer(response)
            lines = response.aiter_lines()
            try:
                async for line in lines:
                    event = calls.read_event(line)
                    if event is not None:
                        yield event
            finally:
                await _end(response, lines)


async def _end(response: httpx.Response, lines: AsyncIterator[str]) -> None:
    """Close an answer that may not be read to its end: httpx's generators inside one another end only at a closed stream."""
    await response.aclose()
    with suppress(httpx.TransportError, httpx.StreamError):
        async for _ in lines:
            pass  # what had been read before
