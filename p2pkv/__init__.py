"""p2pkv: a peer-to-peer, content-addressed network for LLM KV caches.

The names in ``__all__`` are the public API of programs; ``import p2pkv`` alone loads none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from p2pkv.client.aio import AsyncClient
    from p2pkv.client.report import Prefill, PrefillReport
    from p2pkv.client.sync import Client
    from p2pkv.errors import P2pkvError

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "P2pkvError", "Prefill", "PrefillReport", "__version__"]

_HOMES: Final = {
    "AsyncClient": "p2pkv.client.aio",
    "Client": "p2pkv.client.sync",
    "P2pkvError": "p2pkv.errors",
    "Prefill": "p2pkv.client.report",
    "PrefillReport": "p2pkv.client.report",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that every ``import p2pkv.something`` stays as light as that module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
