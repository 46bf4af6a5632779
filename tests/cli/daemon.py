"""A control API with scripted answers: plain HTTP on the control socket of a home, in a thread."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from p2pkv.store.home import HomeLayout

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "peer_id": "12D3KooWTest",
    "addresses": ["/ip4/127.0.0.1/tcp/4101/p2p/12D3KooWTest"],
    "home": "/somewhere",
    "uptime_s": 125.0,
    "connected_peers": ["12D3KooWOther"],
    "dht_peers": ["12D3KooWOther"],
    "fetches": 1,
    "store": {"blocks": 420, "bytes": 86_900_000, "artifacts": 2, "complete_artifacts": 1, "damaged_blocks": 0},
    "served": {
        "channels": 1,
        "blocks": 7,
        "bytes": 2048,
        "refused": 0,
        "rate": 512.0,
        "outstanding_by_peer": {},
        "rate_by_peer": {},
    },
    "announcing": {"keys": 12, "announced": 9, "late_s": 0.0},
    "banned_peers": [],
    "trusted_publishers": 3,
    "condition": {
        "pid": 4711,
        "listen": ["/ip4/127.0.0.1/tcp/4101"],
        "listening": ["/ip4/127.0.0.1/tcp/4101"],
        "bulk_port": 4102,
        "inbound_connections": 0,
        "bootstrap_peers": 0,
        "bootstrap_connected": 0,
        "open_files_limit": 65_536,
    },
}


def progress(
    done: int, total: int, detail: str = "waiting for 3 blocks of 1 peers", state: str = "transferring blocks"
) -> dict[str, Any]:
    peer = {"peer": "12D3KooWOther", "bytes": done, "blocks": 1, "outstanding": 3, "rate": 1e6, "snubbed": False}
    return {"event": "progress", "state": state, "detail": detail, "done_bytes": done, "total_bytes": total, "peers": [peer]}


def file_progress(done: int, total: int, state: str) -> dict[str, Any]:
    """Return an event of a publication, an import or an export."""
    return {"event": "progress", "state": state, "done_bytes": done, "total_bytes": total}


def report(manifest: str, **changes: Any) -> dict[str, Any]:
    return {
        "event": "report",
        "manifest": manifest,
        "token_count": 300,
        "hit_tokens": 300,
        "segments": 2,
        "layers": [0, 2],
        "complete": True,
        "local_bytes": 0,
        "bytes_by_peer": {"12D3KooWOther": 4096, "12D3KooWThird": 8192},
        "rate_by_peer": {"12D3KooWOther": 1e6, "12D3KooWThird": 2e6},
        "duplicate_bytes": 0,
        "blocks_refused": 0,
        "peers_lost": 0,
        "peers_dropped": [],
        "refusals": [],
        "times": {"done_s": 1.5},
    } | changes


_EVENTS = ("/v1/fetch", "/v1/publish", "/v1/import", "/v1/export")


class FakeDaemon:
    """Answers as told: ``answers`` by method and path, else ``events`` to all that answers with events; keeps all bodies.

    With ``hang`` such an answer stays open after its events, until the client leaves; ``left`` is set when it did.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._path = HomeLayout(home).secure_control_socket()
        self.answers: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
            ("GET", "/v1/status"): (200, STATUS),
            ("GET", "/v1/artifacts"): (200, {"artifacts": []}),
        }
        self.events: list[dict[str, Any]] = []
        self.hang = False
        self.left = threading.Event()
        self.requests: list[tuple[str, str, Any]] = []

    @contextmanager
    def running(self) -> Iterator[FakeDaemon]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
                fake.requests.append((self.command, self.path, body))
                if self.path in _EVENTS and (self.command, self.path) not in fake.answers:
                    self._stream()
                else:
                    status, answer = fake.answers.get(
                        (self.command, self.path), (404, {"error": {"code": "artifact.not_found", "message": "?"}})
                    )
                    self._send(status, "application/json", json.dumps(answer).encode())

            do_GET = do_POST = do_DELETE = handle_any

            def _stream(self) -> None:
                data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in fake.events)
                self._send(200, "text/event-stream", data)
                if fake.hang:
                    with suppress(OSError):
                        self.rfile.read(1)  # returns when the client is gone
                    fake.left.set()

            def _send(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

            def address_string(self) -> str:
                return "unix"

        self._path.unlink(missing_ok=True)
        with socketserver.ThreadingUnixStreamServer(str(self._path), Handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()
                self._path.unlink(missing_ok=True)
