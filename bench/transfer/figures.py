"""The figures of a run: medians over its repetitions, by the names that the JSON and the docs use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from bench.results import medians

# What is promised of one transfer holds from one seeder as well as from four: these figures are of the worse of the two.
_PROMISED: Final = ("p2pkv_1", "p2pkv_4")
_CPU_PER_MIB: Final = 256  # CPU seconds are told for this many MiB, however much was moved


def figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the named figures; what was not measured has none."""
    cases = medians(rows)
    found = {f"{case}_mib_s": values["mib_s"] for case, values in cases.items()}
    promised = [cases[case] for case in _PROMISED if case in cases]
    if promised:
        found["first_byte_s"] = max(values["first_byte_s"] for values in promised)
        found["receiver_cpu_s"] = max(values["receiver_cpu_s"] * _CPU_PER_MIB / values["data_mib"] for values in promised)
        found["rss_growth_mib"] = max(values["rss_growth_mib"] for values in promised)
    for case in _PROMISED:
        if "wire_ratio" in cases.get(case, {}):
            found[f"wire_ratio_{case.removeprefix('p2pkv_')}"] = cases[case]["wire_ratio"]
    return found
