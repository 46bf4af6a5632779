"""``p2pkv status``: what the daemon of this home is doing."""

from __future__ import annotations

from typing import Any, Final

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.limits import LATE_ANNOUNCEMENT_S
from p2pkv.units import format_bytes, format_seconds, plural

# The newest ones; --json lists all.
_SHOWN_ARTIFACTS: Final = 10


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what the p2pkv-node of this home is doing.

    Addresses, peers, store, announcements and transfers. Give one of the addresses to other nodes: `p2pkv-node
    --bootstrap ADDRESS`. Announcements that are late mean that others cannot find what this node has.

    \b
    Example:
      p2pkv status
      p2pkv status --json
    """
    with reporting(as_json) as output:
        from p2pkv.client.sync import Client

        with Client(home_of(home)) as client:
            document = {**client.status(), "artifacts": client.artifacts()}
        output.result(document, fields(_pairs(document)))


def _pairs(node: dict[str, Any]) -> list[tuple[str, str]]:
    store, served, announcing = node["store"], node["served"], node["announcing"]
    addresses: list[str] = node["addresses"] or ["nowhere"]
    late = announcing["late_s"]
    artifacts = node["artifacts"]
    pairs = [
        ("node", f"{node['peer_id']}, p2pkv {node['version']}, up {format_seconds(node['uptime_s'])}"),
        ("home", node["home"]),
        ("address", addresses[0]),
        *(("", address) for address in addresses[1:]),
        ("peers", f"{len(node['connected_peers'])} connected, {len(node['dht_peers'])} in the DHT"),
        ("store", f"{plural(store['blocks'], 'block')}, {format_bytes(store['bytes'])}"),
        (
            "announced",
            f"{announcing['announced']} of {plural(announcing['keys'], 'key')}, "
            + (f"the latest is {format_seconds(late)} late" if late > LATE_ANNOUNCEMENT_S else "on time"),
        ),
        ("fetching", plural(node["fetches"], "artifact")),
        ("served", f"{plural(served['blocks'], 'block')}, {format_bytes(served['bytes'])}"),
        ("serving", plural(served["channels"], "stream")),
        ("trusted", plural(node["trusted_publishers"], "publisher")),
        ("artifacts", f"{store['artifacts']}, {store['complete_artifacts']} of them complete"),
        *(("", _artifact_line(artifact)) for artifact in artifacts[:_SHOWN_ARTIFACTS]),
    ]
    if len(artifacts) > _SHOWN_ARTIFACTS:
        pairs.append(("", f"and {len(artifacts) - _SHOWN_ARTIFACTS} more; --json lists all"))
    if node["banned_peers"]:
        pairs.append(("banned", plural(len(node["banned_peers"]), "peer") + " for sending wrong blocks"))
    if store["damaged_blocks"]:
        pairs.append(("damaged", plural(store["damaged_blocks"], "block") + " found and removed; check the disk"))
    return pairs


def _artifact_line(artifact: dict[str, Any]) -> str:
    state = "" if artifact["complete"] else ", incomplete"
    tokens = plural(artifact["token_count"], "token")
    return f"{artifact['manifest_cid']}  {artifact['model_name']}, {artifact['dtype']}, {tokens}{state}"
