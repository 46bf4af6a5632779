"""The table of foreign exceptions covers what libp2p and multiaddr can raise, and maps it into p2pkv's tree."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import libp2p
import multiaddr.exceptions
import pytest
import trio
from libp2p.network.stream.exceptions import StreamReset

from p2pkv.errors import P2pkvError, PeerUnreachableError, UsageError
from p2pkv_node.libp2p_errors import TABLE, translate, translated

# Parts of libp2p that a node never runs.
UNUSED = (
    "libp2p.filecoin",
    "libp2p.pubsub",
    "libp2p.transport.webrtc",
    "libp2p.transport.webtransport",
    "libp2p.tools.async_service",
)


def exception_classes() -> Iterator[type[Exception]]:
    names = [module.name for module in pkgutil.walk_packages(libp2p.__path__, "libp2p.", onerror=lambda _: None)]
    names = [name for name in names if name.endswith(".exceptions") and not name.startswith(UNUSED)]
    assert len(names) > 10, "libp2p keeps its exceptions elsewhere now"
    for module in (*map(importlib.import_module, names), multiaddr.exceptions):
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Exception) and cls.__module__ == module.__name__:
                yield cls


def test_table_covers_every_public_exception() -> None:
    missing = [cls for cls in exception_classes() if not issubclass(cls, tuple(TABLE))]
    assert missing == []


def test_table_maps_into_the_tree() -> None:
    assert all(issubclass(cls, P2pkvError) for cls in TABLE.values())


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        (StreamReset("gone"), PeerUnreachableError),
        (trio.TooSlowError(), PeerUnreachableError),
        (ConnectionRefusedError("refused"), PeerUnreachableError),
        (multiaddr.exceptions.StringParseError("bad", "/ip4/x"), UsageError),
    ],
)
def test_translation_keeps_the_cause_and_says_what_failed(foreign: Exception, expected: type[P2pkvError]) -> None:
    with pytest.raises(expected, match=r"^testing failed: .+") as caught, translated("testing"):
        raise foreign
    assert caught.value.__cause__ is foreign


def test_own_errors_and_faults_pass_untouched() -> None:
    own = UsageError("ours")
    with pytest.raises(UsageError) as caught, translated("testing"):
        raise own
    assert caught.value is own
    with pytest.raises(ZeroDivisionError), translated("testing"):
        _ = 1 // 0


def test_translating_what_the_table_does_not_know_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        translate(ZeroDivisionError(), "testing")
