"""``p2pkv peers``: the peers that the daemon of this home knows."""

from __future__ import annotations

import time
from typing import Any

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import reporting
from p2pkv.units import format_bytes, format_rate, format_seconds, plural


def peers(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the peers that the p2pkv-node of this home knows, the busy ones first.

    Whether each is connected, in the DHT's table or banned, what is on its way from it and to it, and where it can be reached.

    \b
    Example:
      p2pkv peers
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        rows = client.peers()
        output.result({"peers": rows}, [line for row in rows for line in _lines(row)])
        if not rows:
            output.note("No peer is known. Join through one with `p2pkv-node --bootstrap ADDRESS`.")


def _lines(row: dict[str, Any]) -> list[str]:
    states = [name for name, holds in (("connected", row["connected"]), ("DHT", row["dht"])) if holds]
    if row["banned_until"] is not None:
        states.append(f"banned for {format_seconds(max(0.0, row['banned_until'] - time.time()))}")
    if row["wanted_blocks"]:
        pace = "silent" if row["snubbed"] else format_rate(row["receiving_rate"])
        states.append(f"from it {pace}, {plural(row['wanted_blocks'], 'block')} asked")
    if row["sending_rate"] >= 1 or row["outstanding_bytes"]:
        states.append(f"to it {format_rate(row['sending_rate'])}, {format_bytes(row['outstanding_bytes'])} on the way")
    return [f"{row['peer']}  {', '.join(states) or 'known'}", *(f"  {address}" for address in row["addresses"])]
