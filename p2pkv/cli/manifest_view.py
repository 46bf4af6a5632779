"""Manifests as a person reads them, to look at or to sign: what an artifact is, and under what terms."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from p2pkv.formats.draft import NOBODY
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.tensors import LayerGeometry, layer_bytes
from p2pkv.units import DAY, format_bytes, format_seconds, plural

Pairs = list[tuple[str, str]]


def kv_bytes(manifest: Manifest) -> int:
    """Return the bytes of all KV, not coded."""
    return sum(layer_bytes(layer, manifest.tokens.count, manifest.dtype) for layer in manifest.layers)


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says, as JSON values: model, sizes, producer, publisher and terms; null where nobody set them."""
    signed = manifest.publisher != NOBODY
    return {
        "model_id": manifest.model_id.hex(),
        "model_name": manifest.model_name,
        "dtype": manifest.dtype.value,
        "codec": manifest.codec,
        "private": manifest.private,
        "layers": [
            {"kind": layer.kind.value, "kv_heads": layer.kv_heads, "k_dim": layer.k_dim, "v_dim": layer.v_dim}
            for layer in manifest.layers
        ],
        "tokens": manifest.tokens.count,
        "segments": len(manifest.segments),
        "kv_bytes": kv_bytes(manifest),
        "producer": dict(manifest.producer),
        "publisher": manifest.publisher if signed else None,
        "sequence": manifest.sequence if signed else None,
        "created": manifest.created if signed else None,
        "expires": manifest.expires,
        "licence": manifest.licence if signed else None,
    }


def content_pairs(manifest: Manifest, held: int | None = None) -> Pairs:
    """Return what the artifact is, line by line; ``held`` is how many of its segments are stored here, where that is known."""
    layers = layer_lines(manifest.layers)
    here = f", {held} of them here" if held is not None else ""
    return [
        ("model", f"{manifest.model_name} (id {manifest.model_id.hex()})"),
        ("values", f"{manifest.dtype.value}, codec {manifest.codec}{', private' if manifest.private else ''}"),
        ("layers", layers[0]),
        *(("", line) for line in layers[1:]),
        ("tokens", f"{plural(manifest.tokens.count, 'token')} in {plural(len(manifest.segments), 'segment')}{here}"),
        ("size", f"{format_bytes(kv_bytes(manifest))} of KV"),
        ("producer", ", ".join(f"{name} {value}" for name, value in manifest.producer.items()) or "not told"),
    ]


def term_pairs(manifest: Manifest) -> Pairs:
    """Return what the publisher said, line by line."""
    return [
        ("publisher", f"{manifest.publisher}, sequence {manifest.sequence}"),
        ("created", _moment(manifest.created)),
        ("expires", expiry(manifest.expires)),
        ("licence", manifest.licence or "not told"),
    ]


def layer_lines(layers: tuple[LayerGeometry, ...]) -> list[str]:
    """Return a line per stretch of equal layers: ``30 x full attention, 3 KV heads, K 64, V 64``."""
    runs: list[tuple[LayerGeometry, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = layer, runs[-1][1] + 1
        else:
            runs.append((layer, 1))
    return [
        f"{count} x {layer.kind.value} attention, KV heads: {layer.kv_heads}, K: {layer.k_dim}, V: {layer.v_dim}"
        for layer, count in runs
    ]


def expiry(expires: int | None) -> str:
    """Return when a manifest runs out, and how long that is from now."""
    return "never" if expires is None else _moment(expires)


def _moment(seconds: int) -> str:
    """Return a time of a manifest for people, and how long that is from now; it may be any number that the format holds."""
    try:
        date = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M UTC}"
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"
    left = seconds - time.time()
    return f"{date} ({f'in {_span(left)}' if left > 0 else f'{_span(-left)} ago'})"


def _span(seconds: float) -> str:
    days = int(seconds // DAY)
    return f"{days} days" if days >= 2 else format_seconds(seconds)
