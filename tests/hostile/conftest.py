"""What the nodes of some attacks need."""

from tests.node.conftest import lane

__all__ = ["lane"]
