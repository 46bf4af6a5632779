"""The figures of a run, and what is promised of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from bench.trust.detection import POSITIONS, rates
from p2pkv.formats.tensors import Dtype

# Signing and verifying take less than this share of the fetch.
SHARE: Final = 0.05


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the named figures: those of bf16 as they are, those of another dtype with its name behind."""
    found: dict[str, float] = {}
    for row in rows:
        if row["case"] == "costs":
            found |= {name: row[name] for name in ("sign_s", "verify_s", "hash_s")}
    fetches = [row["fetch_s"] for row in rows if row["case"] == "fetch"]
    if fetches:
        found["fetch_s"] = median(fetches)
        found["verify_share_of_fetch"] = (found["sign_s"] + found["verify_s"]) / found["fetch_s"]
        found["hash_share_of_fetch"] = found["hash_s"] / found["fetch_s"]
    found |= _quorum(rows)
    for dtype in Dtype:
        suffix = "" if dtype is Dtype.BF16 else f"_{dtype}"
        own = rates([dict(row) for row in rows], dtype)
        for row in rows:
            if row["case"] == f"cost_{dtype}":
                own |= {f"sample_{count}_s": row[f"sample_{count}_s"] for count in POSITIONS} | {"full_s": row["full_s"]}
        found |= {f"{name}{suffix}": value for name, value in own.items()}
    return found


def _quorum(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what a quorum of two adds to the fetch of a prompt, seconds and bytes, by whether the two agree.

    Of bytes the least of all repetitions: a block that came from two peers at once has nothing to do with it.
    """
    found: dict[str, float] = {}
    for case in ("agreeing", "differing"):
        own = [row for row in rows if row["case"] == f"quorum_{case}"]
        if own:
            seconds = {name: float(median(row[f"{name}_s"] for row in own)) for name in ("prompt", "quorum")}
            found.setdefault("prompt_s", seconds["prompt"])
            found[f"quorum_{case}_s"] = seconds["quorum"] - seconds["prompt"]
            found[f"quorum_{case}_bytes"] = min(row["quorum_bytes"] for row in own) - min(row["prompt_bytes"] for row in own)
    return found


def kept(found: Mapping[str, float]) -> dict[str, bool]:
    """Return which promises hold, by what is promised; only of what was measured."""
    judged: dict[str, bool] = {}
    if "verify_share_of_fetch" in found:
        share = found["verify_share_of_fetch"]
        judged[f"signing and verifying take {share:.1%} of the fetch, below {SHARE:.0%}"] = share < SHARE
    alarms = [value for name, value in found.items() if name.startswith("detect_honest_")]
    if alarms:
        judged[f"honest values are refused in {max(alarms):.1%} of draws"] = not any(alarms)
    return judged
