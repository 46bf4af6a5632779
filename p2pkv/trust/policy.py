"""The trust decision. By default nobody is trusted (design, section 9)."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from p2pkv.errors import ExpiredError, UntrustedPublisherError
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.units import format_seconds


def judge(manifest: Manifest, trusted: Collection[str], now: float) -> None:
    """Accept a manifest whose signature is verified, or raise.

    ``trusted`` are publishers as did:key, ``now`` is wall time in seconds since the epoch. Raises UntrustedPublisherError,
    or ExpiredError when the manifest has run out, or claims to be made later than ``now`` and the allowed skew.
    """
    if manifest.publisher not in trusted:
        raise UntrustedPublisherError(
            f"{manifest.publisher} is not trusted",
            advice=f"If you know the publisher, run `p2pkv trust add {manifest.publisher}`.",
        )
    if manifest.expires is not None and now > manifest.expires + MAX_CLOCK_SKEW_S:
        raise ExpiredError(f"the manifest expired {format_seconds(now - manifest.expires)} ago, on {_date(manifest.expires)}")
    if manifest.created > now + MAX_CLOCK_SKEW_S:
        raise ExpiredError(
            f"the manifest was made {format_seconds(manifest.created - now)} in the future, on {_date(manifest.created)}",
            advice="One of the two clocks is wrong: check yours (`date`).",
        )


def _date(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"
