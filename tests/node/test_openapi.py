"""The OpenAPI document of the control API: valid, of exactly the routes that there are, and true of real answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import trio
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.limits import READ_LEASE_S
from p2pkv.store.staging import open_staging
from p2pkv_node.control import control_app
from p2pkv_node.node import Node
from p2pkv_node.openapi import document
from tests.node.conftest import PROMPT, events_of
from tests.support.artifacts import Sample, make_sample, model
from tests.support.samples import OTHER_KEY, OTHER_PUBLISHER
from tests.support.sim_town import TOKENS
from tests.support.town import Daemon, Town, until

DOCUMENT = document()
OPERATIONS = {(path, method.upper()): call for path, calls in DOCUMENT["paths"].items() for method, call in calls.items()}
NOBODY = str(Cid.of_node(b"nobody"))


def closed(schema: Any) -> Any:
    """Return a schema that allows of each object no field but those that it names: what is not told must not be there."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    return {"additionalProperties": False, **found} if "properties" in schema and schema.get("type") == "object" else found


COMPONENTS = {"components": closed(DOCUMENT["components"])}


def check(schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**COMPONENTS, **closed(schema)}).validate(value)


def schema_of(path: str, method: str, status: int, kind: str = "application/json") -> dict[str, Any]:
    responses = OPERATIONS[path, method]["responses"]
    found: dict[str, Any] = responses.get(str(status), responses["default"])["content"][kind]["schema"]
    return found


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(part)


def test_the_document_is_valid_openapi() -> None:
    OpenAPIV31SpecValidator(cast("Any", DOCUMENT)).validate()
    for schema in walk(DOCUMENT["components"]["schemas"]):
        if "type" in schema:
            Draft202012Validator.check_schema(schema)


def test_it_has_exactly_the_routes_that_there_are() -> None:
    app = control_app(cast("Node", None), trio.Event())  # the handlers are not called
    routes = {
        (route.path, method)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert OPERATIONS.keys() == routes


def test_every_schema_is_used_and_every_call_has_a_name_of_its_own() -> None:
    used = {node["$ref"].rpartition("/")[2] for node in walk(DOCUMENT) if "$ref" in node}
    assert used == DOCUMENT["components"]["schemas"].keys()
    names = [call["operationId"] for call in OPERATIONS.values()]
    assert len(set(names)) == len(names)


class Api:
    """Makes calls, and holds every answer and event against the document."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.seen: set[tuple[str, str]] = set()

    async def call(self, method: str, path: str, body: Any = None, *, status: int = 200, **parameters: str) -> Any:
        self.seen.add((path, method))
        if body is not None:
            check(OPERATIONS[path, method]["requestBody"]["content"]["application/json"]["schema"], body)
        answer = await self._http.request(method, path.format(**parameters), json=body)
        assert answer.status_code == status, answer.text
        check(schema_of(path, method, status), answer.json())
        return answer.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.seen.add((path, "POST"))
        check(OPERATIONS[path, "POST"]["requestBody"]["content"]["application/json"]["schema"], body)
        events = await events_of(self._http, body, path)
        for event in events:
            check(schema_of(path, "POST", 200, "text/event-stream"), event)
        return events


@pytest.fixture
async def api(http: httpx.AsyncClient) -> Api:
    return Api(http)


async def test_real_answers_and_events_are_as_it_says(
    town: Town, daemon: Daemon, api: Api, sample: Sample, tmp_path: Path
) -> None:
    """Every call once at least, and those that have more to tell on a node that has something to tell."""
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    witness = make_sample(TOKENS, key=OTHER_KEY, created=int(time.time()))
    await provider.plant(witness.artifact, witness.blocks)
    daemon.node.trust.rules.add(OTHER_PUBLISHER, "", 0)
    manifest, did = str(sample.cid), encode_did(bytes(range(32)))
    assert (await api.call("GET", "/v1/openapi.json"))["info"] == DOCUMENT["info"]
    for body in ({"manifest": manifest}, PROMPT):  # from the provider, and then from here
        (*_, report) = await api.events("/v1/fetch", body)
        assert report["hit_tokens"] == 600
    heard = await api.events("/v1/fetch", {**PROMPT, "quorum": 2})
    assert [event["event"] for event in heard if event["event"] not in ("progress", "segment")] == [
        "matched",
        "witness",
        "report",
    ]
    await api.events("/v1/fetch", {"manifest": manifest, "segments": 1, "layers": [0, 1], "in_order": True})
    (*_, error) = await api.events("/v1/fetch", {"manifest": NOBODY, "patience_s": 1})
    assert error["event"] == "error"
    for path in ("/v1/status", "/v1/stats", "/v1/peers", "/v1/artifacts"):
        await api.call("GET", path)
    assert [row["peer"] for row in (await api.call("GET", "/v1/peers"))["peers"]]
    await api.call("GET", "/v1/artifacts/{cid}", cid=manifest)
    await api.call("GET", "/v1/artifacts/{cid}", cid=NOBODY, status=404)
    path = str(tmp_path / "artifact.car")
    assert (await api.events("/v1/export", {"manifest": manifest, "path": path}))[-1]["event"] == "report"
    assert (await api.events("/v1/import", {"path": path}))[-1]["event"] == "report"
    assert (await api.events("/v1/import", {"path": "/no/file"}))[-1]["event"] == "error"
    with open_staging(daemon.home) as staging:
        body = {"staging": staging.name, "manifest": manifest}
        assert (await api.events("/v1/publish", body))[-1]["event"] == "report"
    assert (await api.call("POST", "/v1/announce", {"manifest": manifest}))["keys"]
    await api.call("POST", "/v1/announce", {"manifest": NOBODY}, status=404)
    lease = (await api.call("POST", "/v1/leases", {"manifest": manifest, "seconds": 30}, status=201))["lease"]
    await api.call("POST", "/v1/leases/{lease}", {"seconds": 60.5}, lease=lease)
    await api.call("DELETE", "/v1/leases/{lease}", lease=lease)
    await api.call("POST", "/v1/leases/{lease}", {"seconds": 1}, lease=lease, status=404)
    for status in (201, 200):
        await api.call("POST", "/v1/pins", {"name": "release", "manifest": manifest}, status=status)
        await api.call("POST", "/v1/trust", {"publisher": did, "note": "a friend"}, status=status)
    await api.call("GET", "/v1/pins")
    await api.call("GET", "/v1/trust")
    await api.call("DELETE", "/v1/artifacts/{cid}", cid=manifest, status=400)
    await api.call("DELETE", "/v1/pins", {"name": "release"})
    await api.call("DELETE", "/v1/trust", {"publisher": did})
    told = {"model_id": model().model_id.hex(), "device": "cpu", "hit_tokens": 5, "loading_s": 0.1, "tokens_per_s": 10.0}
    await api.call("POST", "/v1/prefills", told)
    await until(lambda: not daemon.node.fetches)  # until then they have leases
    daemon.node.store.collector.due = lambda: False  # type: ignore[method-assign]  # nothing is collected but by the calls
    daemon.node.store.collector._quota = 1
    daemon.node.store.collector._clock = lambda: time.time() + READ_LEASE_S + 60  # the leases of the fetches are over
    assert (await api.call("POST", "/v1/gc", {"dry_run": True}))["evicted"]
    await api.call("DELETE", "/v1/artifacts/{cid}", cid=manifest)
    await api.call("POST", "/v1/gc", {})
    await api.call("GET", "/v1/stats")
    await api.call("POST", "/v1/shutdown")
    assert api.seen == OPERATIONS.keys()


def test_what_the_document_does_not_tell_is_found() -> None:
    right = {"event": "report", "manifest": NOBODY, "segments": 3}
    check(schema_of("/v1/publish", "POST", 200, "text/event-stream"), right)
    for wrong in ({**right, "more": 1}, {**right, "segments": -1}, {**right, "manifest": "x"}, {"event": "report"}):
        assert not Draft202012Validator(
            {**COMPONENTS, **closed(schema_of("/v1/publish", "POST", 200, "text/event-stream"))}
        ).is_valid(wrong)
