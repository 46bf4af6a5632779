"""Targets: files of this machine that people edit and disks damage, and what local programs say to each other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import httpx
from starlette.requests import Request

from p2pkv.client import calls
from p2pkv.connectors.hf import config as hf_config, weights
from p2pkv.errors import FormatError, ModelUnsupportedError, P2pkvError, StoreError, UnknownVersionError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.limits import MAX_LEASE_S
from p2pkv.store.pack import PackWriter, read_contents
from p2pkv.store.pins_file import PinsFile
from p2pkv.units import parse_bytes
from p2pkv_node import requests
from p2pkv_node.config import read_configuration
from p2pkv_node.setting_values import KINDS
from tests.fuzz.formats import text_of
from tests.fuzz.target import Target, hold
from tests.support import samples
from tests.support.memory_file import file_in_memory, in_memory

_FILE: Final = Path("file")  # is named in errors, and not opened
_STAMP: Final[list[list[str | int]]] = [["model.safetensors", 1, 2, 3, 4]]


def pins_file(data: bytes) -> None:
    for pin in PinsFile(_FILE)._parse(data):
        hold(isinstance(pin.manifest_cid, Cid), True)


def pack(data: bytes) -> None:
    """Nothing of a pack is refused: what is whole in it counts, and every record lies within it."""
    with in_memory(data) as descriptor:
        contents = read_contents(descriptor)
    for record in contents.records:
        hold(bool(Cid.from_bytes(record.cid)) and 0 <= record.offset <= record.offset + record.size <= len(data), True)


def configuration(data: bytes) -> None:
    with file_in_memory(data) as path:
        found = read_configuration({}, file=path, environment={})
    found.config()


def setting(data: bytes) -> None:
    name, _, value = text_of(data).partition("=")
    kind = KINDS.get(name)
    if kind is not None:
        kind.parse(value.split(",") if kind.is_list else value)


class _FakeRequest:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def stream(self) -> AsyncIterator[bytes]:
        half = len(self._data) // 2
        yield self._data[:half]
        yield self._data[half:]


def request(data: bytes) -> None:
    """What a handler does with a body, on no event loop: nothing in it waits."""
    reading = requests.read_body(cast("Request", _FakeRequest(data)))
    body: dict[str, Any] = {}
    try:
        reading.send(None)
    except StopIteration as end:
        body = end.value
    finally:
        reading.close()
    requests.seconds_of(body, "seconds", MAX_LEASE_S, default=1.0)
    requests.read_cid(requests.text_of(body, "manifest"))


def event(data: bytes) -> None:
    found = calls.read_event(text_of(data))
    if found is not None and "blocks" in found:
        calls.read_locations(found)


def answer(data: bytes) -> None:
    calls.read_answer(httpx.Response(200 + data[0] if data else 200, content=data[1:]))


def checkpoint(data: bytes) -> None:
    with file_in_memory(data) as path:
        for tensor in weights.read_tensors([path]).values():
            hold(0 <= tensor.start <= tensor.end <= len(data), True)


def digest_slot(data: bytes) -> None:
    """What is damaged there is as good as nothing: the digest is computed again."""
    with file_in_memory(data) as path:
        found = weights._read_slot(path, _STAMP)
    hold(found is None or len(found) == DIGEST_BYTES, True)


def checkpoint_config(data: bytes) -> None:
    hf_config.describe_config(weights._parse_json(data, "config.json"))


def size(data: bytes) -> None:
    found = parse_bytes(text_of(data))
    hold(found is None or found >= 0, True)


def _pack(*, seal: bool) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.pack"
        writer = PackWriter(str(path))
        try:
            for data in samples.BLOCKS:
                writer.append(Cid.of_block(data), memoryview(data))
            if seal:
                writer.seal()
        finally:
            writer.close()
        return path.read_bytes()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


_CID: Final = str(samples.envelope().cid)
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
}
_TENSORS: Final = _json(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [12, 13]},
    }
)
_TOML: Final = b"""listen = ["/ip4/127.0.0.1/tcp/4101"]
bootstrap = ["/ip4/192.0.2.1/tcp/4101/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"]
announce = ["/dns4/example.org/tcp/4101"]
quota = "10GiB"
upload_limit = 1000
bulk_port = 4102
web = "[::1]:9464"
mirror = false
log_level = "debug"
"""
_SETTINGS: Final = tuple(
    line.replace(b" = ", b"=").replace(b'"', b"").replace(b"[/", b"/").replace(b"]\n", b"") for line in _TOML.splitlines()
)

TARGETS: Final = (
    Target(
        "pins-file",
        pins_file,
        (_json({"version": 1, "pins": [{"name": "book", "manifest": _CID, "created": samples.CREATED}]}),),
        (StoreError, UnknownVersionError),
    ),
    Target("pack", pack, (_pack(seal=True), _pack(seal=False)), ()),
    Target("configuration", configuration, (_TOML, *_TOML.splitlines()), (UsageError,)),
    Target("setting", setting, _SETTINGS, (UsageError,)),
    Target("size", size, (b"10GiB", b"1.5 MiB", b"831"), ()),
    Target("request", request, (_json({"manifest": _CID, "seconds": 1.5}), _json({"manifest": _CID})), (UsageError,)),
    Target(
        "event",
        event,
        tuple(
            b"data: " + _json(event)
            for event in (
                {"event": "matched", "manifest": _CID, "blocks": {_CID: ["00000001.pack", 128, 64]}},
                {"event": "segment", "index": 3, "blocks": {_CID: None}},
                {"event": "report"},
                {"event": "error", "code": "fetch.incomplete", "message": "gone", "advice": "Try again."},
            )
        ),
        (P2pkvError,),  # whatever the daemon reports
    ),
    Target("answer", answer, (b"\0{}", b"\xc8" + _json({"error": {"code": "usage", "message": "no"}})), (P2pkvError,)),
    Target(
        "checkpoint",
        checkpoint,
        (len(_TENSORS).to_bytes(8, "little") + _TENSORS + bytes(13),),
        (FormatError, ModelUnsupportedError),
    ),
    Target("digest-slot", digest_slot, (_json({"stamp": _STAMP, "weights": "00" * DIGEST_BYTES}),), ()),
    Target("checkpoint-config", checkpoint_config, (_json(_CONFIG),), (FormatError, ModelUnsupportedError, UsageError)),
)
