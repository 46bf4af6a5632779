"""Checks of the running node: whether it answers, and what it tells of its network (``GET /v1/status``).

Those that take a status raise KeyError or TypeError for one that lacks what they read, as a node of another version may.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from p2pkv import __version__
from p2pkv.client.doctor.finding import Finding, State
from p2pkv.errors import DaemonUnreachableError, P2pkvError
from p2pkv.limits import LATE_ANNOUNCEMENT_S
from p2pkv.store.home import Holder
from p2pkv.units import format_seconds, plural

Status: TypeAlias = Mapping[str, Any]
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_LISTEN_ADVICE: Final = "Enough for this machine alone. For others, let it `listen` on /ip4/0.0.0.0/tcp/4101."


def check_lock(holder: Holder | None) -> Finding:
    name = "lock"
    if holder is None:
        return Finding(name, State.OK, "free: no node has this home")
    if holder.confirmed:
        return Finding(name, State.OK, f"held by process {holder.pid}")
    said = "says nothing" if holder.pid is None else f"says {holder.pid}, which no process of this machine confirms"
    return Finding(
        name,
        State.WARNING,
        f"held by a process that cannot be named from here: the lock file {said}",
        "The node may run in another container or on another machine; look there, and run this there.",
    )


def check_daemon(answer: Status | P2pkvError, holder: Holder | None) -> Finding:
    """Whether the node answers on its control socket; ``answer`` is its status, or why there is none."""
    name = "daemon"
    if not isinstance(answer, P2pkvError):
        return Finding(name, State.OK, f"answers, up {format_seconds(answer['uptime_s'])}")
    if not isinstance(answer, DaemonUnreachableError):
        return Finding(name, State.PROBLEM, answer.message, answer.advice)
    if holder is None:
        advice = "Start it with `p2pkv-node`, or name the home of one that runs with --home or P2PKV_HOME."
        return Finding(name, State.WARNING, "no p2pkv-node runs on this home", advice)
    how = f" `kill {holder.pid}` ends it," if holder.confirmed else " Restart it where it runs,"
    return Finding(
        name,
        State.PROBLEM,
        f"a process has this home and does not answer: {answer.message}",
        f"It may be starting: try again in some seconds. Else look at its log.{how} and what it was fetching resumes.",
    )


def check_version(status: Status) -> Finding:
    theirs = status["version"]
    if theirs == __version__:
        return Finding("version", State.OK, f"{theirs}, of node and command alike")
    return Finding(
        "version",
        State.WARNING,
        f"the node is of version {theirs}, this command of {__version__}",
        "Restart the node with the version that is installed (`p2pkv-node --version`), or call the command beside it.",
    )


def check_ports(status: Status) -> Finding:
    """Whether the node listens on what it was told, and on more than loopback."""
    name, condition = "ports", status["condition"]
    listening: list[str] = condition["listening"]
    text = ", ".join(listening) or "nothing"
    lost = [address for address in condition["listen"] if address not in listening and not address.endswith("/tcp/0")]
    if lost or not listening:
        advice = "Restart the node, and look at its log for the reason."
        return Finding(name, State.PROBLEM, f"told to listen on {', '.join(lost) or 'something'}, listens on {text}", advice)
    bulk = condition["bulk_port"]
    text += ", without the bulk lane" if bulk is None else f", with the bulk lane at port {bulk}"
    if all(address.is_loopback for address in _hosts(listening)):
        return Finding(name, State.WARNING, f"{text}: on loopback alone", _LISTEN_ADVICE)
    return Finding(name, State.OK, text)


def check_reachability(status: Status) -> Finding:
    """Whether others reach this node, as far as it can know from who came and what others are told."""
    name = "reachability"
    came, told = status["condition"]["inbound_connections"], status["addresses"]
    if came:
        return Finding(name, State.OK, f"{plural(came, 'connection')} came from other addresses since the start")
    hosts = _hosts(told)
    named = len(hosts) < len(told)  # an address by name, of which only the name server knows what it is
    if not named and all(host.is_loopback for host in hosts):
        return Finding(name, State.WARNING, "others are told nothing but loopback addresses", _LISTEN_ADVICE)
    if not named and not any(host.is_global for host in hosts):
        return Finding(
            name,
            State.UNKNOWN,
            "nobody came yet, and others are told private addresses alone",
            "Enough for a local network. Behind a router, forward the ports and name its address with `announce`.",
        )
    return Finding(
        name,
        State.UNKNOWN,
        "nobody came yet; others are told a public address",
        "Open the ports in the firewall, and let another machine run `p2pkv-node --bootstrap` with an address of this node.",
    )


def check_dht(status: Status) -> Finding:
    """Whether the node knows others, and its bootstrap peers are there."""
    condition = status["condition"]
    known, told, there = len(status["dht_peers"]), condition["bootstrap_peers"], condition["bootstrap_connected"]
    text = f"{plural(known, 'peer')} in the routing table, {len(status['connected_peers'])} connected"
    text += f", {there} of {plural(told, 'bootstrap peer')}" if told else ", no bootstrap peers"
    if known:
        return Finding("DHT", State.OK, text)
    if not told:
        advice = (
            "Start the node with --bootstrap and an address that another node prints, or wait for others to name this one."
        )
        return Finding("DHT", State.WARNING, f"{text}: nothing can be found or announced", advice)
    return Finding(
        "DHT",
        State.PROBLEM,
        f"{text}: nothing can be found or announced",
        "Check that the bootstrap peers run and that this machine can reach them; the node's log says why each failed.",
    )


def check_announcements(status: Status) -> Finding:
    announcing = status["announcing"]
    late = announcing["late_s"]
    text = f"{announcing['announced']} of {plural(announcing['keys'], 'key')}"
    if late > LATE_ANNOUNCEMENT_S:
        return Finding(
            "announcements",
            State.WARNING,
            f"{text}, the latest is {format_seconds(late)} late: others cannot find all that is here",
            "After a start with many artifacts this takes a while. Otherwise see DHT above, and the node's log.",
        )
    return Finding("announcements", State.OK, f"{text}, on time")


def _hosts(addresses: Iterable[str]) -> list[_Address]:
    """Return the IP addresses of multiaddrs; those that name their host otherwise are left out."""
    parts = [address.split("/") for address in addresses]
    return [ipaddress.ip_address(part[2]) for part in parts if len(part) > 2 and part[1] in ("ip4", "ip6")]
