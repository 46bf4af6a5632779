"""The figures of a run, and what is promised of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench.results import medians

# At least so much of the rate of a plain write, so many MiB/s, and less than so many seconds.
PUBLISH_SHARE: Final = 0.5
READ_VERIFIED_MIB_S: Final = 1536.0
OPEN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of a case, in words with the measured value, and whether it is kept."""

    text: str
    kept: bool


def figures(rows: Iterable[Mapping[str, Any]], blocks: int) -> dict[str, float]:
    """Return the named figures of a run; ``blocks`` blocks were in the homes that were opened."""
    cases = medians(rows)
    found = {f"{case}_mib_s": values["mib_s"] for case, values in cases.items() if "mib_s" in values}
    found["publish_share"] = found["publish_mib_s"] / found["plain_write_mib_s"]
    found |= {f"{case}_{blocks // 1000}k_s": cases[case]["seconds"] for case in ("open", "open_killed")}
    return found


def promises(rows: Iterable[Mapping[str, Any]]) -> dict[str, Promise]:
    """Return what is promised by case, judged by the medians of ``rows``."""
    cases = medians(rows)
    share = cases["publish"]["mib_s"] / cases["plain_write"]["mib_s"]
    rate = cases["read_verified"]["mib_s"]
    kept = {
        "publish": Promise(f"{share:.2f} of plain_write; at least {PUBLISH_SHARE}", share >= PUBLISH_SHARE),
        "read_verified": Promise(f"at least {READ_VERIFIED_MIB_S:,.0f} MiB/s", rate >= READ_VERIFIED_MIB_S),
    }
    for case in ("open", "open_killed"):
        kept[case] = Promise(f"less than {OPEN_S:.0f} s", cases[case]["seconds"] < OPEN_S)
    return kept
