"""A node inside a program: the same control socket, in a thread that ends with the block."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from p2pkv import Client
from p2pkv.errors import DaemonUnreachableError, HomeLockedError, ListenError, UsageError
from p2pkv.store.home import HomeLayout
from p2pkv_node import EmbeddedNode, embedded_node


def node_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "p2pkv-node"]


def test_it_serves_its_block_and_leaves_nothing(tmp_path: Path) -> None:
    with embedded_node(tmp_path / "home") as node, Client(node.home) as client:
        status = client.status()
        assert node == EmbeddedNode(tmp_path / "home", status["peer_id"], tuple(status["addresses"]))
        assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in node.addresses)  # not reachable from outside
        client.close()
    assert node_threads() == []
    assert not HomeLayout(node.home).control_socket.exists()
    with pytest.raises(DaemonUnreachableError):
        client.status()


def test_the_default_home_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_HOME", str(tmp_path / "default"))
    with (
        embedded_node(bulk=False, mirror=False) as first,
        embedded_node(tmp_path / "second", bootstrap=first.addresses) as node,
    ):
        assert first.home == tmp_path / "default"
        with Client(node.home) as client:
            assert client.status()["connected_peers"] == [first.peer_id]
        with Client() as client:
            assert client.status()["peer_id"] == first.peer_id
    assert node_threads() == []


def test_a_home_that_is_taken(tmp_path: Path) -> None:
    with embedded_node(tmp_path) as node:
        with pytest.raises(HomeLockedError), embedded_node(tmp_path):
            pytest.fail("two nodes on one home")
        with Client(node.home) as client:
            assert client.status()["peer_id"] == node.peer_id
    assert node_threads() == []


def test_settings_that_are_not_possible(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown setting 'colour'"), embedded_node(tmp_path, colour="red"):
        pytest.fail("it started")
    with pytest.raises(ListenError), embedded_node(tmp_path, listen=["/ip4/203.0.113.9/tcp/0"]):
        pytest.fail("it started")
    with pytest.raises(UsageError), embedded_node(tmp_path, bootstrap=["nonsense"]):
        pytest.fail("it started")
    assert node_threads() == []


def test_an_error_of_the_block_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), embedded_node(tmp_path):
        _ = 1 / 0
    assert node_threads() == []


def test_it_may_be_shut_down_by_a_client_before_its_block_ends(tmp_path: Path) -> None:
    with embedded_node(tmp_path) as node, Client(node.home) as client:
        (thread,) = node_threads()
        client.shutdown()
        thread.join(20)
        assert not thread.is_alive()
