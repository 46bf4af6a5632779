"""All checks, in the order in which to read them: the home, the machine, the node and its network."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from p2pkv.client import calls
from p2pkv.client.doctor import home as home_checks, machine, node
from p2pkv.client.doctor.finding import Finding, State
from p2pkv.errors import P2pkvError
from p2pkv.limits import DOCTOR_PATIENCE_S
from p2pkv.store.files import map_os_error
from p2pkv.store.home import HomeLayout, find_holder
from p2pkv.store.rebuild import set_aside
from p2pkv.store.survey import IndexSurvey, PackSurvey, survey_index, survey_packs

Looked = TypeVar("Looked")

_OF_NODE: Final[tuple[tuple[str, Callable[[node.Status], Finding]], ...]] = (
    ("version", node.check_version),
    ("ports", node.check_ports),
    ("reachability", node.check_reachability),
    ("DHT", node.check_dht),
    ("announcements", node.check_announcements),
)


def examine(home: Path) -> list[Finding]:
    """Look at ``home``, its node and this machine, and return what was found.

    Changes nothing and asks no network. Raises nothing: what cannot be looked at is a problem or not known.
    """
    layout = HomeLayout(home)
    holder = _attempt("lock", lambda: find_holder(home))
    answer = _attempt("daemon", lambda: ask_status(home))
    index = _attempt("index", lambda: survey_index(layout.index))
    packs = _attempt("packs", lambda: survey_packs(layout.blocks))
    status = answer if isinstance(answer, dict) else {}
    signed = _attempt("trust", lambda: home_checks.times_signed(home))
    newest = None if isinstance(index, P2pkvError) or index is None else index.newest
    held_by = None if isinstance(holder, P2pkvError) else holder
    return [
        _finding("home", lambda: home_checks.check_home(home)),
        _finding("keys", lambda: home_checks.check_keys(home)),
        _finding("trust", lambda: home_checks.check_trust(home)),
        _finding("revocations", lambda: home_checks.check_revocations(home, time.time())),
        _failed("lock", holder) if isinstance(holder, P2pkvError) else node.check_lock(holder),
        _failed("index", index) if isinstance(index, P2pkvError) else _check_index(layout, index, packs),
        _failed("packs", packs) if isinstance(packs, P2pkvError) else home_checks.check_packs(packs, _damaged(status)),
        _finding("disk", lambda: home_checks.check_disk(home)),
        _finding("file system", lambda: home_checks.check_file_system(home)),
        machine.check_clock(
            time.time(), newest, machine.clock_is_synchronised(), () if isinstance(signed, P2pkvError) else signed
        ),
        _check_open_files(status),
        node.check_daemon(answer, held_by),
        *(_of_node(name, check, status) for name, check in _OF_NODE),
    ]


def ask_status(home: Path) -> dict[str, Any]:
    """Return the status of the node on ``home``, within DOCTOR_PATIENCE_S. Raises DaemonUnreachableError, StoreError."""
    transport = httpx.HTTPTransport(uds=str(calls.socket_of(home)))
    with httpx.Client(transport=transport, base_url=calls.BASE_URL, timeout=DOCTOR_PATIENCE_S) as http:
        try:
            return calls.read_answer(http.request(calls.STATUS.method, calls.STATUS.path))
        except httpx.TransportError as error:
            raise calls.unreachable(error, home) from error


def _attempt(name: str, look: Callable[[], Looked]) -> Looked | P2pkvError:
    try:
        return look()
    except P2pkvError as error:
        return error
    except OSError as error:
        return map_os_error(error, f"look at the {name}")


def _finding(name: str, check: Callable[[], Finding]) -> Finding:
    found = _attempt(name, check)
    return _failed(name, found) if isinstance(found, P2pkvError) else found


def _failed(name: str, error: P2pkvError) -> Finding:
    return Finding(name, State.PROBLEM, error.message, error.advice)


def _of_node(name: str, check: Callable[[node.Status], Finding], status: node.Status) -> Finding:
    if not status:
        return Finding(name, State.UNKNOWN, "only a running node can tell", "Start `p2pkv-node`, and run this again.")
    try:
        return _finding(name, partial(check, status))
    except (KeyError, TypeError, ValueError):
        advice = "Restart the node with the version of this command, and run this again."
        return Finding(name, State.UNKNOWN, "the node does not tell: it is of another version", advice)


def _check_index(layout: HomeLayout, index: IndexSurvey | None, packs: PackSurvey | P2pkvError) -> Finding:
    aside = _attempt("home", lambda: set_aside(layout.index))
    return home_checks.check_index(
        index,
        None if isinstance(packs, P2pkvError) else packs,
        [] if isinstance(aside, P2pkvError) else aside,  # the finding of the home says why
    )


def _damaged(status: node.Status) -> int | None:
    match status:
        case {"store": {"damaged_blocks": int(count)}}:
            return count
    return None


def _check_open_files(status: node.Status) -> Finding:
    match status:
        case {"condition": {"open_files_limit": int() | None as limit}}:
            return machine.check_open_files(limit, of_node=True)
    return machine.check_open_files(machine.open_files_limit(), of_node=False)
