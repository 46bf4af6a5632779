"""A tiny model, its published document, and a daemon that says what a test wants it to say."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from p2pkv.artifact.read import Artifact
from p2pkv.formats.cid import Cid
from p2pkv.formats.segment import Segment
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location
from tests.support.crafted import Pieces, compute
from tests.support.llama import build_model, cache_bytes, local_cache, random_tokens

SHARED = 600
Sealed = tuple[Artifact, dict[Cid, bytes]]


class ScriptedDaemon:
    """Answers each fetch with the next script: events, and lines as they are.

    :attr:`asked` keeps what was asked for, :attr:`told` how prefills went,
    which is answered once :attr:`answers` is set.

    A script that ends in ``None`` ends as a killed daemon's answer does: in the middle. ``home`` holds the blocks. An event
    that lists ``blocks`` is sent with the places where they lie by then, as the daemon does; another goes out as it is.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.scripts: list[Sequence[dict[str, Any] | str | None]] = []
        self.asked: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()
        layout = HomeLayout(home)
        layout.create()
        self.blocks = BlockPacks(layout.blocks)
        self.socket = layout.secure_control_socket()

    def hold(self, blocks: dict[Cid, bytes]) -> None:
        for cid, data in blocks.items():
            self.blocks.write(cid, data)

    def locate(self, cids: Iterable[Cid]) -> dict[str, Location | None]:
        """Return what stands under ``blocks`` in an event."""
        return {str(cid): self.blocks.locate(cid) for cid in cids}

    def _line(self, item: dict[str, Any] | str) -> str:
        if isinstance(item, str):
            return item
        blocks = item.get("blocks")
        return f"data: {json.dumps({**item, 'blocks': self.locate(blocks)} if isinstance(blocks, list) else item)}"

    @contextmanager
    def running(self) -> Iterator[None]:
        script_of = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/prefills":
                    script_of.told.append(body)
                    script_of.answers.wait()
                    self.send_error(404)  # as from a daemon that does not know the call
                    return
                script_of.asked.append(body)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for item in script_of.scripts.pop(0):
                    if item is None:
                        self.close_connection = True
                        return
                    data = f"{script_of._line(item)}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

            def address_string(self) -> str:
                return "unix"

        with socketserver.ThreadingUnixStreamServer(str(self.socket), Handler) as server:
            server.daemon_threads = True  # a client that keeps its connection open does not keep the test open
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()
                self.socket.unlink()


def matched(artifact: Artifact) -> dict[str, Any]:
    token_block = artifact.manifest.tokens.cid
    blocks = [artifact.cid] if token_block is None else [artifact.cid, token_block]
    return {"event": "matched", "manifest": str(artifact.cid), "hit_tokens": SHARED, "segments": 3, "blocks": blocks}


def segments(sealed: Sealed, *indices: int) -> list[dict[str, Any]]:
    """Return the events of segments whose blocks are all here."""
    return [{"event": "segment", "index": index, "blocks": blocks_of(sealed, index)} for index in indices]


def blocks_of(sealed: Sealed, index: int) -> list[Cid]:
    """Return the node of a segment and what it names, or nothing where the artifact has no such segment."""
    artifact, blocks = sealed
    nodes = artifact.manifest.segments[index : index + 1]
    return [cid for node in nodes for cid in (node, *(ref.cid for ref in Segment.decode(blocks[node]).blocks()))]


REPORT = {"event": "report", "manifest": None}


@pytest.fixture(scope="package", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Clients and daemons share the cores: pools of waiting threads would only take them from one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def daemon(tmp_path: Path, sealed: Sealed) -> Iterator[ScriptedDaemon]:
    """A scripted daemon that holds the document's artifact."""
    found = ScriptedDaemon(tmp_path / "home")
    found.hold(sealed[1])
    with closing(found.blocks), found.running():
        yield found


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return build_model()


@pytest.fixture(scope="session")
def document() -> list[int]:
    """Two segments and a tail."""
    return random_tokens(SHARED)


@pytest.fixture(scope="session")
def prompt(document: list[int]) -> list[int]:
    return [*document, *random_tokens(9, seed=2)]


@pytest.fixture(scope="session")
def expected(model: LlamaForCausalLM, prompt: list[int]) -> bytes:
    """Keys and values of the prompt's cache, computed here."""
    return cache_bytes(local_cache(model, prompt, SHARED))


@pytest.fixture(scope="session")
def pieces(model: LlamaForCausalLM, document: list[int]) -> Pieces:
    return compute(model, document)


@pytest.fixture(scope="session")
def sealed(pieces: Pieces) -> Sealed:
    """The document's artifact, signed."""
    return pieces.signed()
