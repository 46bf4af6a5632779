"""What a node tells of its condition, for the doctor to judge."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import trio

from p2pkv.client.doctor.examine import examine
from p2pkv.client.doctor.finding import State
from p2pkv_node.libp2p_host import _is_remote
from tests.support.town import Daemon, Town, in_thread, until

ANY = ("/ip4/0.0.0.0/tcp/0",)


async def condition(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = (await daemon.client.status())["condition"]
    return found


async def test_a_node_tells_where_it_listens_and_who_is_there(town: Town) -> None:
    daemon = await town.start("daemon")
    found = await condition(daemon)
    assert found == {
        "pid": os.getpid(),
        "listen": ["/ip4/127.0.0.1/tcp/0"],
        "listening": [f"/ip4/127.0.0.1/tcp/{daemon.listen_port}"],
        "bulk_port": daemon.node.context.bulk.port,  # type: ignore[union-attr] # the port of the real lane
        "inbound_connections": 0,
        "bootstrap_peers": 1,
        "bootstrap_connected": 1,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


async def test_a_node_without_lane_and_others(town: Town) -> None:
    daemon = await town.start("daemon", bulk=False, bootstrap=())
    found = await condition(daemon)
    assert (found["bulk_port"], found["bootstrap_peers"], found["bootstrap_connected"]) == (None, 0, 0)
    findings = {finding.name: finding for finding in await in_thread(lambda: examine(daemon.home))}
    assert findings["ports"].state is State.WARNING
    assert "without the bulk lane" in findings["ports"].found


async def test_connections_count_that_came_over_a_network(town: Town) -> None:
    daemon = await town.start("daemon", listen=ANY)
    over_network = [address for address in daemon.node.network.addresses if not address.startswith("/ip4/127.")]
    if not over_network:
        pytest.skip("this machine has no address but loopback")
    with trio.fail_after(20):
        await town.start("near", bootstrap=(f"/ip4/127.0.0.1/tcp/{daemon.listen_port}/p2p/{daemon.peer_id}",))
        await until(lambda: len(daemon.node.network.connected_peers) == 2)
        assert (await condition(daemon))["inbound_connections"] == 0
        await town.start("far", bootstrap=(over_network[0],))
        await until(lambda: daemon.node.network.inbound_connections == 1)


@pytest.mark.parametrize(
    ("address", "remote"),
    [
        (("127.0.0.1", 1), False),
        (("127.9.9.9", 1), False),
        (("::1", 1), False),
        (("::ffff:127.0.0.1", 1), False),
        (None, False),
        (("192.0.2.1", 1), True),
        (("fe80::1%eth0", 1), True),
        (("::ffff:192.0.2.1", 1), True),
    ],
)
def test_loopback_is_no_network(address: tuple[str, int] | None, remote: bool) -> None:
    assert _is_remote(address) is remote
