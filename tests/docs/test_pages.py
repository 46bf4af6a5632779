"""What the pages say of codes, limits, settings and the control API is what the code says."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from typing import Any, cast

import pytest
import trio
from starlette.routing import Route

from p2pkv import Client, errors, limits
from p2pkv.client.report import Prefill, PrefillReport
from p2pkv.download.engine import PeerProgress
from p2pkv.errors import EXIT_STATUS, error_classes
from p2pkv.routing.announcer import AnnouncerStatistics
from p2pkv.store.collect import Collected, Evicted
from p2pkv.store.home import HomeLayout
from p2pkv.store.index import StoredArtifact
from p2pkv.store.progress import Step
from p2pkv.store.store import StoreStatistics
from p2pkv.swarm.report import FetchReport, FetchState, Matched, Progress, Refusal, SegmentReady
from p2pkv.swarm.serve import ServerStatistics
from p2pkv.trust.rules import Rule
from p2pkv_node.condition import Condition
from p2pkv_node.config import DEFAULT_LISTEN, NodeConfig
from p2pkv_node.control import _STATUS, control_app
from p2pkv_node.node import Node
from p2pkv_node.openapi.schemas import SCHEMAS
from tests.docs.pages import NAMES, ROOT, prose, read, rows, section
from tests.support.commands import commands, options

LIMIT = re.compile(r"`([A-Z][A-Z0-9_]+)` \(([\d,.]+)\)")


def quoted(text: str) -> set[str]:
    """Return every name that stands in backquotes."""
    return set(re.findall(r"`([\w.]+)`", text))


def names(*classes: Any) -> set[str]:
    return {field.name for cls in classes for field in fields(cls)}


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_those_of_the_code(name: str) -> None:
    for limit, value in LIMIT.findall(prose(name)):
        assert getattr(limits, limit) == float(value.replace(",", "")), f"{name}: {limit}"


def test_every_error_code_has_its_row_with_whose_doing_it_is() -> None:
    told = {row[0].strip("`"): row[1] for row in rows(section("docs/operating.md", "## Errors by code"))[1:]}
    own = {code: cls for code, cls in error_classes().items() if cls.__module__ == errors.__name__}
    assert told == {code: cls.fault.value for code, cls in own.items()}


def test_exit_statuses_are_those_of_the_code() -> None:
    text = section("docs/operating.md", "## Errors by code")
    for fault, status in EXIT_STATUS.items():
        assert re.search(rf"`{fault.value}`\s{status}\b", text), fault


def test_every_setting_has_its_row() -> None:
    table = {row[0].strip("`"): row for row in rows(section("docs/operating.md", "## Settings"))[1:] if row[0]}
    assert set(table) == names(NodeConfig)
    for name, row in table.items():
        assert f"`--{name.replace('_', '-')}`" in row[1]
        assert row[2] == f"`P2PKV_{name.upper()}`"
    assert table["listen"][3] == f"`{DEFAULT_LISTEN[0]}`"
    for field in fields(NodeConfig):
        if isinstance(field.default, bool | int | str):
            assert table[field.name][3].lower() == f"`{str(field.default).lower()}`"


def test_the_files_of_the_home_are_listed() -> None:
    text = section("docs/operating.md", "## Files of the home")
    names = [name for name, member in vars(HomeLayout).items() if isinstance(member, property) and name != "control_socket"]
    assert len(names) > 10
    for name in names:
        assert f"`{getattr(HomeLayout(ROOT), name).relative_to(ROOT)}" in text, name
    assert "`control.sock`" in text


def test_every_route_has_its_row_and_section() -> None:
    app = control_app(cast("Node", None), trio.Event())  # the handlers are not called
    routes = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    text = read("docs/control-api.md")
    told = set(re.findall(r"^\| \[`([A-Z]+) (/v1/[^`]*)`\]", text, re.MULTILINE))
    assert told == routes


def test_statuses_follow_from_faults() -> None:
    told = {
        row[1].split("`")[1]: int(row[0]) for row in rows(section("docs/control-api.md", "## Errors"))[1:] if row[0] != "404"
    }
    assert told == {fault.value: status for fault, status in _STATUS.items()}


@pytest.mark.parametrize(
    ("heading", "classes", "unsaid"),
    [
        ("## `GET /v1/status`", (StoreStatistics, ServerStatistics, AnnouncerStatistics, Condition), set[str]()),
        ("## `GET /v1/artifacts`", (StoredArtifact,), set[str]()),
        ("### Events", (Progress, PeerProgress, Matched, SegmentReady, FetchReport, Refusal), {"artifact"}),
        ("## `/v1/trust`", (Rule,), set[str]()),
        ("## `POST /v1/gc`", (Collected, Evicted), set[str]()),
    ],
)
def test_the_fields_of_answers_are_told(heading: str, classes: tuple[Any, ...], unsaid: set[str]) -> None:
    text = section("docs/control-api.md", heading)
    assert names(*classes) - unsaid <= quoted(text) | set(re.findall(r'"(\w+)"', text))


@pytest.mark.parametrize(
    ("heading", "schema"),
    [
        ("## `GET /v1/stats`", "Stats"),
        ("## `GET /v1/peers`", "Peers"),
        ("## `POST /v1/publish`", "PublishReport"),
        ("## `POST /v1/import`", "ImportReport"),
        ("## `POST /v1/export`", "ExportReport"),
        ("### Events of files", "FileProgress"),
        ("## `/v1/leases`", "Lease"),
    ],
)
def test_the_fields_of_the_openapi_document_are_told(heading: str, schema: str) -> None:
    text = section("docs/control-api.md", heading)
    told = quoted(text) | set(re.findall(r'"(\w+)"', text))
    assert properties(SCHEMAS[schema]) - {"event"} <= told


def properties(schema: Any) -> set[str]:
    """Return the names of an object's fields, and of those of the objects that it lists."""
    own: dict[str, Any] = schema.get("properties", {})
    return set(own).union(*(properties(field["items"]) for field in own.values() if "items" in field))


def test_the_steps_of_work_on_files_are_told() -> None:
    text = section("docs/control-api.md", "### Events of files")
    assert all(f"`{step.value}`" in text for step in Step)


def test_the_states_of_a_fetch_are_told() -> None:
    text = section("docs/control-api.md", "### Events")
    assert all(f"`{state.value}`" in text for state in FetchState)


def test_the_fields_of_a_prefill_are_told() -> None:
    assert names(Prefill) <= quoted(section("docs/python.md", "## Load a prefill"))
    assert names(PrefillReport) <= quoted(section("docs/python.md", "## The report"))


@pytest.mark.parametrize("name", commands())
def test_every_command_is_told_with_its_options(name: str) -> None:
    paragraphs = [" ".join(lines.split()) for lines in section("docs/cli.md", "## Commands").split("\n\n")]
    told = " ".join(text for text in paragraphs if re.search(rf"\*\*`p2pkv {name}[` ]", text))
    assert told, f"docs/cli.md does not tell of `p2pkv {name}`"
    for option in options(commands()[name]):
        assert any(re.search(rf"{spelling}\b", told) for spelling in option), f"`p2pkv {name}` has {option[0]}"


def test_every_argument_of_a_prefill_is_told() -> None:
    keywords = {name for name, found in signature(Client.prefill).parameters.items() if found.kind is found.KEYWORD_ONLY}
    assert keywords <= quoted(section("docs/python.md", "## Load a prefill"))
