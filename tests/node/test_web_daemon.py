"""Metrics, health and status page of real daemon processes over TCP: what moves, who may read, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from bench.processes import NodeProcess, node_process
from p2pkv import __version__
from p2pkv.client.sync import Client
from p2pkv.errors import EXIT_STATUS, Fault
from p2pkv.limits import SHUTDOWN_GRACE_S
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from p2pkv.store.trust_file import TrustFile
from p2pkv_node.web.guard import CONTENT_SECURITY_POLICY, HEADERS
from tests.docs.pages import rows, section
from tests.node.conftest import PROMPT
from tests.support.artifacts import PUBLISHER, Sample

pytestmark = pytest.mark.slow

WEB = ("--web", "127.0.0.1:0")
PATHS = ("/", "/page.css", "/page.js", "/chart.js", "/status.json", "/metrics", "/healthz", "/readyz")
PATIENCE_S = 30


@dataclass(frozen=True)
class Pair:
    """Two daemons: the provider holds the sample, the consumer knows it and trusts its publisher."""

    provider: NodeProcess
    consumer: NodeProcess


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with open_store(folder / "provider") as store:
        for cid, data in sample.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(sample.artifact, range(3))
    layout = HomeLayout(folder / "consumer")
    layout.create()
    TrustFile(layout.trust).add(PUBLISHER, "", int(time.time()))
    with (
        node_process(folder / "provider", options=WEB) as provider,
        node_process(folder / "consumer", options=WEB, bootstrap=[provider.address]) as consumer,
    ):
        yield Pair(provider, consumer)


def get(node: NodeProcess, path: str, **headers: str) -> httpx.Response:
    assert node.web is not None
    return httpx.get(node.web + path, headers=headers, timeout=PATIENCE_S)


def figures(node: NodeProcess) -> dict[str, float]:
    """Return every sample, named as Prometheus shows it."""
    found: dict[str, float] = {}
    text = get(node, "/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found
            found[name] = sample.value
    return found


def fetch(node: NodeProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the last event of a fetch."""
    transport = httpx.HTTPTransport(uds=str(HomeLayout(node.home).control_socket))
    with httpx.Client(transport=transport, base_url="http://p2pkv", timeout=PATIENCE_S) as http:
        answer = http.post("/v1/fetch", json=body)
    last: dict[str, Any] = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    return last


# --- metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_move_with_what_the_nodes_do(pair: Pair, sample: Sample) -> None:
    before, served = figures(pair.consumer), figures(pair.provider)
    assert before[f"p2pkv_build_info{{version={__version__}}}"] == before["p2pkv_ready"] == 1
    assert served["p2pkv_store_blocks"] == len(sample.blocks)
    assert served["p2pkv_store_bytes"] == sum(map(len, sample.blocks.values()))
    assert served["p2pkv_store_artifacts{held=whole}"] == served["p2pkv_connected_peers"] == 1
    assert before["p2pkv_store_artifacts{held=whole}"] == before["p2pkv_store_bytes"] == 0

    assert fetch(pair.consumer, {**PROMPT, "token_ids": [7] * 300, "patience_s": 5})["hit_tokens"] == 0
    assert fetch(pair.consumer, PROMPT)["hit_tokens"] == 600
    assert fetch(pair.consumer, {"manifest": str(sample.cid), "segments": 99})["code"] == "usage"
    after, sent = figures(pair.consumer), figures(pair.provider)
    moved = {name: after[name] - before[name] for name in after if name.startswith("p2pkv_")}
    outcomes = {name: moved[f"p2pkv_fetches_total{{outcome={name}}}"] for name in ("complete", "partial", "miss", "failed")}
    assert outcomes == {"complete": 1, "partial": 0, "miss": 1, "failed": 1}
    assert (moved["p2pkv_prompt_tokens_total"], moved["p2pkv_hit_tokens_total"]) == (300 + 602, 600)
    size = sum(map(len, sample.blocks.values()))
    received = [moved[f"p2pkv_received_bytes_total{{path={path}}}"] for path in ("lane", "stream")]
    assert sum(received) == size
    assert received[1] > 0  # manifest and nodes, at least
    assert sent["p2pkv_sent_bytes_total"] - served["p2pkv_sent_bytes_total"] == size
    assert sent["p2pkv_sent_blocks_total"] - served["p2pkv_sent_blocks_total"] == len(sample.blocks)
    assert (moved["p2pkv_store_bytes"], moved["p2pkv_store_artifacts{held=whole}"]) == (size, 1)
    assert moved["p2pkv_refused_blocks_total"] == after["p2pkv_banned_peers"] == 0
    assert after["p2pkv_disk_free_bytes"] > 0
    assert after["process_open_fds"] > 0


def test_openmetrics_where_the_scraper_asks_for_it(pair: Pair) -> None:
    answer = get(pair.provider, "/metrics", Accept="application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(answer.text)}  # type: ignore[no-untyped-call]  # it has no types
    assert {"p2pkv_build", "p2pkv_fetches", "p2pkv_store_bytes", "process_cpu_seconds"} <= names
    assert get(pair.provider, "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_every_metric_is_told_of(pair: Pair) -> None:
    with Client(pair.provider.home) as client:
        client.collect()  # before the first one there is no last one
    text = section("docs/operating.md", "## Metrics and status page")
    told = set(re.findall(r"`(p2pkv_\w+)`", text))
    assert told == {name.partition("{")[0] for name in figures(pair.provider) if name.startswith("p2pkv_")}
    paths = {row[0].strip("`") for row in rows(text) if row[0].startswith("`/")}
    assert paths == {*PATHS} - {"/page.css", "/page.js", "/chart.js"}


def test_health_readiness_and_status(pair: Pair, sample: Sample) -> None:
    assert (get(pair.provider, "/healthz").status_code, get(pair.provider, "/healthz").text) == (200, "ok\n")
    assert (get(pair.provider, "/readyz").status_code, get(pair.provider, "/readyz").text) == (200, "ready\n")
    status = get(pair.provider, "/status.json").json()
    assert (status["peer_id"], status["unready"], status["transfers"]) == (pair.provider.peer_id, None, [])
    (row,) = status["artifacts"]
    assert (row["manifest_cid"], row["held_segments"], row["pins"]) == (str(sample.cid), 3, [])
    (peer,) = status["peers"]
    assert (peer["peer"], peer["connected"], peer["banned_until"]) == (pair.consumer.peer_id, True, None)


# --- who may read, and what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
def test_every_answer_has_the_headers(pair: Pair, path: str) -> None:
    answers = [
        get(pair.provider, path),
        get(pair.provider, path, Host="evil.example"),
        httpx.post(f"{pair.provider.web}{path}"),
        httpx.head(f"{pair.provider.web}{path}"),
    ]
    found = 404 if path == "/nowhere" else 200
    assert [answer.status_code for answer in answers] == [found, 421, 405, found]
    for answer in answers:
        assert {name: answer.headers.get_list(name) for name in HEADERS} == {name: [text] for name, text in HEADERS.items()}
        assert not any(name.startswith("access-control-") for name in answer.headers)
        assert "server" not in answer.headers
    assert answers[3].content == b""


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere(pair: Pair) -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    page = get(pair.provider, "/").text
    assert "style=" not in page
    assert "http" not in page
    assert page.count("<script") == page.count('<script type="module" src="/page.js">') == 1
    assert not any(word in get(pair.provider, path).text for path in PATHS[2:4] for word in ("innerHTML", "insertAdjacent"))


def test_only_requests_that_name_this_port_are_answered(pair: Pair) -> None:
    port = urlsplit(pair.provider.web or "").port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert get(pair.provider, "/healthz", Host=host).status_code == 200, host
    bad = (
        f"evil.example:{port}",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:1",
        f"127.0.0.1.evil.example:{port}",
        f"x@127.0.0.1:{port}",
    )
    for host in bad:
        answer = get(pair.provider, "/status.json", Host=host)
        assert (answer.status_code, answer.text) == (421, "This port answers to its own address alone.\n"), host


@pytest.mark.parametrize("hosts", [(), ("127.0.0.1:{port}", "evil.example"), ("",)])
def test_a_request_with_no_host_or_two(pair: Pair, hosts: tuple[str, ...]) -> None:
    port = urlsplit(pair.provider.web or "").port
    version = "1.1" if hosts else "1.0"
    head = [f"GET /status.json HTTP/{version}", *(f"Host: {host.format(port=port)}" for host in hosts), "Connection: close"]
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*head, ""]).encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.split(b" ")[1] in (b"400", b"421")
    assert pair.provider.peer_id.encode() not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_but_reading(pair: Pair, method: str) -> None:
    for path in PATHS:
        answer = httpx.request(method, f"{pair.provider.web}{path}")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


# --- the port -------------------------------------------------------------------------------------------------------------


def test_off_by_default_and_ends_in_time_while_it_is_read(tmp_path: Path) -> None:
    with node_process(tmp_path / "home") as node:
        assert node.web is None
    with node_process(tmp_path / "home", options=WEB) as node, httpx.Client(base_url=node.web or "") as http:
        assert http.get("/status.json").status_code == 200  # and the connection stays open
        started = time.perf_counter()
        node.process.terminate()
        node.process.wait(PATIENCE_S)
        assert time.perf_counter() - started < SHUTDOWN_GRACE_S
        assert node.process.returncode == 0


def test_the_page_on_ipv6(tmp_path: Path) -> None:
    with node_process(tmp_path / "home", options=["--web", "[::1]:0"]) as node:
        assert (node.web or "").startswith("http://[::1]:")
        assert get(node, "/healthz").text == "ok\n"


def test_a_port_that_is_taken(pair: Pair, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p2pkv_node", "--home", str(tmp_path / "home"), "--json"]
    taken = (pair.provider.web or "").removeprefix("http://")
    options = ["--listen", "/ip4/127.0.0.1/tcp/0", "--web", taken]
    done = subprocess.run([*command, *options], text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (EXIT_STATUS[Fault.ENVIRONMENT], "")
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (error["code"], error["message"]) == ("node.listen", f"the status page cannot listen on {taken}: it is taken")
    assert "--web" in error["advice"]
