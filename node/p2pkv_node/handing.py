"""The part of the control API for whole artifacts that come in, go out and are shared: publish, announce, import, export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from p2pkv.store.car_file import CarArtifact
from p2pkv.store.progress import Progress, Step
from p2pkv_node.events import Events, answer_with_events
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, read_cid, text_of


async def _publish(node: Node, request: Request) -> Response:
    body = await read_body(request)
    return answer_with_events(node, partial(_run_publish, node, text_of(body, "staging"), _manifest_of(body)))


async def _run_publish(node: Node, staging: str, manifest: Cid, events: Events) -> None:
    artifact = await node.publish(staging, manifest, _progress(events))
    events.end("report", {"manifest": str(manifest), "segments": len(artifact.chain_keys)})


async def _announce(node: Node, request: Request) -> Response:
    manifest = _manifest_of(await read_body(request))
    return JSONResponse({"manifest": str(manifest), "keys": await node.announce_again(manifest)})


async def _import(node: Node, request: Request) -> Response:
    return answer_with_events(node, partial(_run_import, node, _path_of(await read_body(request))))


async def _run_import(node: Node, path: Path, events: Events) -> None:
    imported = await node.import_car(path, _progress(events))
    publisher = imported.artifact.manifest.publisher
    events.end("report", {**_report(imported), "publisher": publisher, "new_bytes": imported.new_bytes})


async def _export(node: Node, request: Request) -> Response:
    body = await read_body(request)
    return answer_with_events(node, partial(_run_export, node, _manifest_of(body), _path_of(body)))


async def _run_export(node: Node, manifest: Cid, path: Path, events: Events) -> None:
    exported = await node.export_car(manifest, path, _progress(events))
    events.end("report", {**_report(exported), "file": str(path)})


def _progress(events: Events) -> Progress:
    """Return what makes events of how far the work is."""

    def hear(step: Step, done: int, total: int) -> None:
        events.emit("progress", {"state": step.value, "done_bytes": done, "total_bytes": total})

    return hear


def _report(car: CarArtifact) -> dict[str, Any]:
    artifact = car.artifact
    return {
        "manifest": str(artifact.cid),
        "tokens": artifact.manifest.tokens.count,
        "blocks": car.blocks,
        "bytes": car.file_bytes,
    }


def _manifest_of(body: dict[str, Any]) -> Cid:
    return read_cid(text_of(body, "manifest"))


def _path_of(body: dict[str, Any]) -> Path:
    """Return the file that a client names: the daemon's working folder means nothing to it. Raises UsageError."""
    text = text_of(body, "path")
    try:
        absolute = text.startswith("/") and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        absolute = False
    if not absolute:
        raise UsageError("`path` is not an absolute path", advice="Name the file from the root folder on, as /tmp/book.car.")
    return Path(text)


HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("/v1/publish", "POST"): _publish,
    ("/v1/announce", "POST"): _announce,
    ("/v1/import", "POST"): _import,
    ("/v1/export", "POST"): _export,
}
