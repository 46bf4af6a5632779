"""The OpenAPI 3.1 document of the control API: what each call takes and answers, for programs in any language."""

from __future__ import annotations

from typing import Any

from p2pkv import __version__
from p2pkv_node.openapi.calls import PATHS
from p2pkv_node.openapi.schemas import SCHEMAS


def document() -> dict[str, Any]:
    """Return the document. Fields may be added to answers and events; readers ignore those that they do not know."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "p2pkv control API",
            "version": __version__,
            "description": (
                "HTTP/1.1 on the unix socket `control.sock` in the home of a p2pkv-node; its file permissions are the access "
                "control. Fields may be added to answers and events."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://p2pkv", "description": "The host is no host: connections go to the unix socket."}],
        "paths": PATHS,
        "components": {"schemas": SCHEMAS},
    }
