"""The shell of a p2pkv node: libp2p, sockets, HTTP. The only package that imports libp2p.

``embedded_node`` is its public API; importing the package alone does not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pkv_node.embedded import EmbeddedNode, embedded_node

__all__ = ["EmbeddedNode", "embedded_node"]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: libp2p takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("p2pkv_node.embedded"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
