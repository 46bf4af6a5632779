"""Short forms of the JSON schemas (2020-12) that the document is made of."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
BYTES: Final[Schema] = {"type": "integer", "minimum": 0, "description": "Bytes."}
SECONDS: Final[Schema] = {"type": "number", "minimum": 0, "description": "Seconds."}
RATE: Final[Schema] = {"type": "number", "minimum": 0, "description": "Bytes per second."}
EPOCH: Final[Schema] = {"type": "number", "description": "Seconds since the epoch."}
CID: Final[Schema] = {"type": "string", "pattern": "^b[a-z2-7]+$", "description": "CIDv1 in base32."}
PEER: Final[Schema] = {"type": "string", "description": "Peer id of libp2p, in base58."}
HEX_DIGEST: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
BASE64: Final[Schema] = {"type": "string", "contentEncoding": "base64"}


def ref(name: str) -> Schema:
    """Return the schema of that name."""
    return {"$ref": f"#/components/schemas/{name}"}


def said(schema: Schema, description: str) -> Schema:
    """Return ``schema`` with what it means here."""
    return {**schema, "description": description}


def constant(text: str) -> Schema:
    return {"const": text}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def items(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def by(schema: Schema) -> Schema:
    """Return an object whose names are data, with values of ``schema``."""
    return {"type": "object", "additionalProperties": schema}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def obj(fields: dict[str, Schema], *, optional: tuple[str, ...] = (), description: str = "") -> Schema:
    """Return an object of ``fields``, all of them there but the ``optional`` ones."""
    required = [name for name in fields if name not in optional]
    found: Schema = {"type": "object", "properties": fields}
    if required:
        found["required"] = required
    if description:
        found["description"] = description
    return found
