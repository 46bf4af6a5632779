"""Real nodes with their control sockets in one trio run: libp2p, TLS and HTTP over loopback, each home a folder."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from nacl.signing import SigningKey
from transformers import PreTrainedModel
from trio_typing import TaskStatus

from p2pkv.artifact.read import Artifact
from p2pkv.client.aio import AsyncClient
from p2pkv.client.publishing import Staged
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.ports import BlockStore
from p2pkv.routing.boundaries import announce_keys
from p2pkv.store.store import Store
from p2pkv_node.config import NodeConfig
from p2pkv_node.daemon import run_daemon
from p2pkv_node.libp2p_host import swarm_of
from p2pkv_node.node import Node

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
DEADLINE_S = 20.0
KEY = SigningKey(bytes(range(32)))
PUBLISHER = encode_did(bytes(KEY.verify_key))


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for what threads, processes or other nodes bring about."""
    with trio.fail_after(deadline_s):
        while not condition():  # noqa: ASYNC110 - none of these sets a trio event
            await trio.sleep(0.005)


@dataclass
class Daemon:
    """A running daemon and a client of it."""

    node: Node
    client: AsyncClient
    home: Path
    _stop: trio.Event
    _stopped: trio.Event

    @property
    def peer_id(self) -> str:
        return self.node.network.peer_id

    @property
    def address(self) -> str:
        return self.node.network.addresses[0]

    @property
    def listen_port(self) -> int:
        """Where it really listens, whatever it tells others."""
        (listener,) = swarm_of(self.node.network.host).listeners.values()
        (address,) = listener.get_addrs()
        return int(address.value_for_protocol("tcp"))

    async def stop(self) -> None:
        await self.client.aclose()  # an idle connection is waited for
        self._stop.set()
        await self._stopped.wait()

    async def announced(self) -> None:
        """Wait until everything that is to be announced was announced once."""

        def all_told() -> bool:
            figures = self.node.announcer.statistics()
            return figures.announced == figures.keys

        await until(all_told)

    async def publish(self, model: PreTrainedModel, token_ids: Sequence[int], key: SigningKey = KEY, **terms: Any) -> Staged:
        """Publish and wait until others can find it."""
        staged = await self.client.publish(model, token_ids, key, **terms)
        await self.announced()
        return staged

    async def plant(self, artifact: Artifact, blocks: dict[Cid, bytes], held: Iterable[int] | None = None) -> None:
        """Hold and announce an artifact without asking whether it is right, as a bad peer would."""
        for cid, data in blocks.items():
            self.node.store.write(cid, data)
        segments = range(len(artifact.manifest.segments)) if held is None else held
        self.node.store.index.add_artifact(artifact, segments)
        self.node.announcer.add(announce_keys(artifact.cid, artifact.manifest.tokens.count, artifact.chain_keys))
        await self.announced()


class Town:
    """A place for daemons. The first one is a bare bootstrap node, the only address that the others are told."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._daemons: list[Daemon] = []

    @property
    def bootstrap(self) -> tuple[str, ...]:
        return (self._daemons[0].address,) if self._daemons else ()

    async def start(
        self,
        name: str,
        *,
        trusted: Iterable[str] = (PUBLISHER,),
        serve_from: Callable[[Store], BlockStore] = lambda store: store,
        **settings: Any,
    ) -> Daemon:
        """Start a daemon on the home ``name``. ``settings`` are those of NodeConfig."""
        config = NodeConfig(self._folder / name, **{"listen": LOOPBACK, "bootstrap": self.bootstrap, **settings})
        daemon: Daemon = await self._nursery.start(self._run, config, serve_from)
        for did in trusted:
            daemon.node.trust.rules.add(did, "", int(time.time()))
        self._daemons.append(daemon)
        return daemon

    async def close(self) -> None:
        async with trio.open_nursery() as nursery:
            for daemon in self._daemons:
                nursery.start_soon(daemon.stop)

    @staticmethod
    async def _run(config: NodeConfig, serve_from: Callable[[Store], BlockStore], *, task_status: TaskStatus[Daemon]) -> None:
        stop, stopped = trio.Event(), trio.Event()
        async with AsyncExitStack() as stack:
            stack.callback(stopped.set)
            client = await stack.enter_async_context(AsyncClient(config.home))

            def ready(node: Node) -> None:
                task_status.started(Daemon(node, client, config.home, stop, stopped))

            await run_daemon(config, ready=ready, stop=stop, serve_from=serve_from)


@asynccontextmanager
async def open_town(folder: Path) -> AsyncIterator[Town]:
    """Yield a town with its bootstrap node; leaving stops all daemons."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        town = Town(folder, nursery)
        # An error of the body is carried around the nursery, which would wrap it in a group.
        try:
            await town.start("bootstrap", trusted=(), bulk=False)
            yield town
        except Exception as error:
            failure = error
        with trio.CancelScope(shield=True, deadline=trio.current_time() + DEADLINE_S):
            await town.close()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run what blocks (the synchronous client, waiting for a process) beside the daemons."""
    return await trio.to_thread.run_sync(work)
