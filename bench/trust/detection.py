"""How often ``verify=sample`` sees a manipulation.

Every token is recomputed over the manipulated values once; then positions are drawn as a consumer draws them, many times, and
judged by the same code. A draw says what that many positions would have said: a token's values do not depend on which others
are recomputed with it, but for the last bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

from bench.trust.manipulations import MANIPULATIONS
from bench.trust.subject import Measured, Subject, measure
from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.deviations import relative, summarise
from p2pkv.formats.tensors import Dtype
from p2pkv.trust.spot_check import draw_positions
from p2pkv.trust.tolerances import tolerances

POSITIONS: Final = (8, 32, 128)


def measure_detection(dtype: Dtype, found: dict[str, Subject], draws: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a row for each manipulation of each text: the share of ``draws`` draws that see it, by number of positions."""
    for number, (text, one) in enumerate(found.items()):
        for name, manipulate in MANIPULATIONS.items():
            rng = random.Random(f"{seed} {number} {name}")
            measured = measure(one, manipulate(one, rng))
            rates = {count: detected(measured, dtype, count, draws, rng) for count in POSITIONS}
            yield {
                "case": f"{name}_{dtype}",
                "text": text,
                "manipulation": name,
                "dtype": dtype.value,
                "tokens": one.tokens,
                **{f"detect_{count}": rate for count, rate in rates.items()},
            }


def detected(measured: Measured, dtype: Dtype, count: int, draws: int, rng: random.Random) -> float:
    """Return the share of draws of ``count`` positions in which keys or values are outside of what is tolerated."""
    tokens = measured.keys[0].shape[1]
    seen = 0
    for _ in range(draws):
        drawn = draw_positions(tokens, count, rng)
        bounds = tolerances(dtype, len(measured.keys[0]), same_stack=True)
        halves = zip((measured.keys, measured.values), bounds, strict=True)
        within = (
            summarise(relative(difference[:, drawn], scale[:, drawn]), drawn, bound).within
            for (difference, scale), bound in halves
        )
        seen += not all(within)
    return seen / draws


def measure_cost(dtype: Dtype, one: Subject, repetitions: int) -> dict[str, Any]:
    """Return the median seconds of a spot check of ``one`` by number of positions, beside those of computing all of it."""
    cache = hf.open_cache(one.model)
    for layer, (keys, values) in enumerate(one.honest):
        cache.update(keys, values, layer)
    producer = hf.producer_stack(one.model)
    row: dict[str, Any] = {"case": f"cost_{dtype}", "dtype": dtype.value, "tokens": one.tokens}
    for count in POSITIONS:
        times = []
        for repetition in range(repetitions + 1):  # the first one warms up
            drawn = draw_positions(one.tokens, count, random.Random(repetition))
            started = time.perf_counter()
            check = hf.spot_check(one.model, one.token_ids, cache, drawn, producer)
            times.append(time.perf_counter() - started)
            if not check.passed:
                raise RuntimeError(f"honest values were refused: {check}")
        row[f"sample_{count}_s"] = median(times[1:])
    started = time.perf_counter()
    hf.prefill(one.model, one.token_ids, hf.open_cache(one.model), hf.canonical_steps(one.tokens))
    row["full_s"] = time.perf_counter() - started
    return row


def rates(rows: Sequence[dict[str, Any]], dtype: Dtype) -> dict[str, float]:
    """Return ``detect_<manipulation>_<positions>`` of one dtype: the mean over texts."""
    found: dict[str, float] = {}
    for name in MANIPULATIONS:
        own = [row for row in rows if row.get("manipulation") == name and row["dtype"] == dtype.value]
        for count in POSITIONS:
            if own:
                found[f"detect_{name}_{count}"] = sum(row[f"detect_{count}"] for row in own) / len(own)
    return found
