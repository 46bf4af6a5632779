"""Every call of the control API, built and read in one place; the clients only send (``docs/control-api.md``)."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from p2pkv.artifact.slice import Slice
from p2pkv.errors import DaemonUnreachableError, FormatError, P2pkvError, UsageError, error_from_dict
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_FILE_OFFSET
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location, is_pack

# The host is no host: the transport goes to the daemon's unix socket.
BASE_URL: Final = "http://p2pkv"
# A daemon on the same machine that is silent for longer than this is stuck. What is told by events takes as long as it takes.
CALL_TIMEOUT: Final = httpx.Timeout(30.0, connect=2.0)
EVENTS_TIMEOUT: Final = httpx.Timeout(None, connect=2.0)
_SAME_VERSION: Final = "Is it a p2pkv-node of this version?"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the daemon."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None


STATUS: Final = Call("GET", "/v1/status")
ARTIFACTS: Final = Call("GET", "/v1/artifacts")
TRUST_LIST: Final = Call("GET", "/v1/trust")
PINS: Final = Call("GET", "/v1/pins")
PEERS: Final = Call("GET", "/v1/peers")
STATS: Final = Call("GET", "/v1/stats")
SHUTDOWN: Final = Call("POST", "/v1/shutdown")


def artifact(manifest: Cid) -> Call:
    return Call("GET", f"/v1/artifacts/{manifest}")


def publish(staging: str, manifest: Cid) -> Call:
    return Call("POST", "/v1/publish", {"staging": staging, "manifest": str(manifest)})


def announce(manifest: Cid) -> Call:
    return Call("POST", "/v1/announce", {"manifest": str(manifest)})


def import_car(file: Path) -> Call:
    return Call("POST", "/v1/import", {"path": _path(file)})


def export_car(manifest: Cid, file: Path) -> Call:
    return Call("POST", "/v1/export", {"manifest": str(manifest), "path": _path(file)})


def _path(file: Path) -> str:
    """Return how a file is named to the daemon, whose working folder is another. Raises UsageError."""
    try:
        return str(file.absolute()).encode().decode()
    except UnicodeEncodeError:
        raise UsageError("the name of the file is not UTF-8", advice="Give it another name.") from None


def fetch_manifest(manifest: Cid, patience_s: float, wanted: Slice, *, in_order: bool, impatient: bool = False) -> Call:
    body: dict[str, Any] = {"manifest": str(manifest), "patience_s": patience_s}
    if wanted.segments is not None:
        body["segments"] = wanted.segments
    if wanted.layers is not None:
        body["layers"] = [wanted.layers.start, wanted.layers.stop]
    if in_order:
        body["in_order"] = True
    if impatient:
        body["impatient"] = True
    return Call("POST", "/v1/fetch", body)


def trust_add(did: str, note: str) -> Call:
    return Call("POST", "/v1/trust", {"publisher": did, "note": note})


def trust_remove(did: str) -> Call:
    return Call("DELETE", "/v1/trust", {"publisher": did})


def pin(name: str, manifest: Cid) -> Call:
    return Call("POST", "/v1/pins", {"name": name, "manifest": str(manifest)})


def unpin(name: str, manifest: Cid | None) -> Call:
    return Call("DELETE", "/v1/pins", {"name": name, **({"manifest": str(manifest)} if manifest is not None else {})})


def lease(manifest: Cid, seconds: float) -> Call:
    return Call("POST", "/v1/leases", {"manifest": str(manifest), "seconds": seconds})


def renew(lease: str, seconds: float) -> Call:
    return Call("POST", f"/v1/leases/{lease}", {"seconds": seconds})


def release(lease: str) -> Call:
    return Call("DELETE", f"/v1/leases/{lease}")


def remove(manifest: Cid) -> Call:
    return Call("DELETE", f"/v1/artifacts/{manifest}")


def collect(*, dry_run: bool) -> Call:
    return Call("POST", "/v1/gc", {"dry_run": dry_run})


def socket_of(home: Path) -> Path:
    """Return the control socket of the daemon that keeps ``home``. Raises DaemonUnreachableError where there is none."""
    path = HomeLayout(home).secure_control_socket()
    if not path.exists():
        raise DaemonUnreachableError(f"no p2pkv-node is running on {home}")
    return path


def read_answer(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON of an answer whose body is read. Raises the error that the daemon reports."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise DaemonUnreachableError(f"the daemon answered {response.status_code} without JSON", advice=_SAME_VERSION)
    if response.is_error:
        error = body.get("error")
        raise error_from_dict(error if isinstance(error, dict) else {"message": f"the daemon answered {response.status_code}"})
    return body


def read_envelope(answer: Mapping[str, Any]) -> Envelope:
    """Return the envelope of an answer about an artifact. Raises FormatError."""
    try:
        data = base64.b64decode(answer["envelope"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise FormatError("the daemon did not tell the artifact's envelope", advice=_SAME_VERSION) from None
    return Envelope.decode(data)


def read_event(line: str) -> dict[str, Any] | None:
    """Return the event of one line of an answer; ``None`` for a line without one. Raises the error it reports."""
    if not line.startswith("data: "):
        return None
    try:
        event: dict[str, Any] = json.loads(line[len("data: ") :])
    except (ValueError, RecursionError):
        event = {}
    match event:
        case {"event": "error"}:
            raise error_from_dict(event)
        case {"event": "report" | "progress"}:
            return event
        case {"event": "matched" | "witness", "manifest": str(), "blocks": dict()}:
            return event
        case {"event": "segment", "index": index, "blocks": dict()} if _is_number(index):
            return event
    raise DaemonUnreachableError(f"the daemon sent an event that is none: {line[:80]!r}", advice=_SAME_VERSION)


def read_locations(event: Mapping[str, Any]) -> dict[str, Location]:
    """Return where the blocks of an event lie, by CID text; what the daemon could not locate is left out.

    Raises DaemonUnreachableError for what is no location in its folder of blocks.
    """
    found: dict[str, Location] = {}
    for cid, location in event["blocks"].items():
        match location:
            case None:
                continue
            case [str(file), offset, size] if (
                is_pack(file) and _is_number(offset, MAX_FILE_OFFSET) and _is_number(size, MAX_CODED_BLOCK_BYTES)
            ):
                found[cid] = Location(file, offset, size)
            case _:
                raise DaemonUnreachableError(f"the daemon located block {cid[:80]!r} where none can be", advice=_SAME_VERSION)
    return found


def _is_number(value: object, most: float = math.inf) -> bool:
    """Return whether ``value`` is an integer from 0 to ``most``; JSON's true and false are none, although Python's are."""
    return type(value) is int and 0 <= value <= most


def no_report() -> P2pkvError:
    """Return what to raise for an answer of events that ends before its report."""
    return DaemonUnreachableError(
        "the p2pkv-node ended before the call did", advice="What is here is kept: run the same command again to resume."
    )


def unreachable(error: httpx.TransportError, home: Path) -> P2pkvError:
    """Map what httpx raises when the daemon is gone or stuck."""
    if isinstance(error, httpx.TimeoutException):
        return DaemonUnreachableError(
            f"the p2pkv-node on {home} does not answer", advice="Look at its log, or restart it: fetches resume."
        )
    return DaemonUnreachableError(f"the p2pkv-node on {home} is not running ({error})")
