"""Programs tell the daemon how their prefills went."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx

from p2pkv.limits import MAX_NAME_BYTES, MAX_TOKENS
from tests.support.town import Daemon

TOLD: dict[str, Any] = {"model_id": "01" * 32, "device": "cpu", "hit_tokens": 1024, "loading_s": 0.5, "tokens_per_s": None}
NONSENSE: dict[str, tuple[object, ...]] = {
    "model_id": (None, 1, "01", "zz" * 32),
    "device": (None, "", "x" * (MAX_NAME_BYTES + 1)),
    "hit_tokens": (None, -1, MAX_TOKENS + 1, True, 1.0, "1"),
    "loading_s": (None, -0.1, 86_401, True, "1", math.nan, math.inf, 10**400),
    "tokens_per_s": (0, -1, True, "fast", math.nan, math.inf, 1e-3, 10**400),
}


async def saved(http: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await http.post("/v1/prefills", json={**TOLD, **fields})
    assert answer.status_code == 200
    return answer.json()["saved_s"]


async def test_they_are_summed_at_the_rates_that_are_known(daemon: Daemon, http: httpx.AsyncClient) -> None:
    assert await saved(http) is None
    assert await saved(http, hit_tokens=0, loading_s=1, tokens_per_s=512) == -1
    assert await saved(http) == 1.5
    body = {name: value for name, value in TOLD.items() if name != "tokens_per_s"}
    assert (await http.post("/v1/prefills", json=body)).json() == {"saved_s": 1.5}
    figures = daemon.node.savings.statistics()
    assert (figures.rated, figures.unrated, figures.saved_s) == (3, 1, 2.0)


async def test_nonsense_is_refused_and_counts_for_nothing(daemon: Daemon, http: httpx.AsyncClient) -> None:
    for field, values in NONSENSE.items():
        for value in values:
            answer = await http.post("/v1/prefills", content=json.dumps({**TOLD, field: value}))
            assert answer.status_code == 400, (field, value)
            error = answer.json()["error"]
            assert error["code"] == "usage"
            assert field in error["message"]
    assert daemon.node.savings.statistics().unrated == 0
