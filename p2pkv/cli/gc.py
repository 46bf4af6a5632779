"""``p2pkv gc``, ``pin``, ``unpin`` and ``remove``: what a node keeps, and what may go."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.errors import CidError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.units import format_bytes, plural

ManifestArgument = Annotated[str, typer.Argument(metavar="MANIFEST", help="Manifest CID of a stored artifact, bafyr4i...")]
NameOption = Annotated[str, typer.Option("--name", help="Name of the pin; an artifact may have several.")]
_DEFAULT_NAME = "pinned"


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect garbage: blocks that belong to no artifact, and, above the quota, the artifacts that were unused longest.

    The node does this by itself. What is pinned, being fetched or being read never goes.

    \b
    Example:
      p2pkv gc --dry-run
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        collected = client.collect(dry_run=dry_run)
        output.result(collected, _summary(collected))


def pin(
    manifest: ManifestArgument, name: NameOption = _DEFAULT_NAME, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Keep an artifact, whatever the quota, until it is unpinned.

    \b
    Example:
      p2pkv pin bafyr4iabc... --name release
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        cid = parse_manifest(manifest)
        added = client.pin(name, cid)
        line = f"pinned as {name}: {cid}" if added else f"pinned as {name} already: {cid}"
        output.result({"name": name, "manifest": str(cid), "added": added}, [line])


def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin.")] = _DEFAULT_NAME,
    manifest: Annotated[str | None, typer.Option(help="This artifact alone; default: all that are pinned so.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a pin away. The artifact stays until room is needed.

    \b
    Example:
      p2pkv unpin release
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        removed = client.unpin(name, parse_manifest(manifest) if manifest is not None else None)
        output.result({"name": name, "removed": removed}, [f"{plural(removed, 'pin')} taken away"])


def pins(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List what is pinned, by name.

    \b
    Example:
      p2pkv pins
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        found = client.pins()
        lines = [
            f"{pin['name']}  {pin['manifest']}  since {datetime.fromtimestamp(pin['created'], UTC):%Y-%m-%d}" for pin in found
        ]
        output.result({"pins": found}, lines)
        if not found:
            output.note("Nothing is pinned. Keep an artifact with `p2pkv pin MANIFEST`.")


def remove(manifest: ManifestArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Take an artifact off this node: it is served and announced no longer, and `p2pkv gc` gives its room back.

    \b
    Example:
      p2pkv remove bafyr4iabc...
    """
    from p2pkv.client.sync import Client

    with reporting(as_json) as output, Client(home_of(home)) as client:
        cid = parse_manifest(manifest)
        client.remove(cid)
        output.result({"manifest": str(cid), "removed": True}, [f"removed: {cid}"])


def parse_manifest(text: str) -> Cid:
    """Parse the CID on the command line. Raises UsageError."""
    try:
        return Cid.parse(text)
    except CidError as error:
        raise UsageError(f"{text[:80]!r} is no CID: {error.message}", advice="Copy it from `p2pkv status`.") from None


def _summary(collected: dict[str, Any]) -> list[str]:
    would = "would go" if collected["dry_run"] else "collected"
    lines = [f"{would}: {e['manifest_cid']}  {format_bytes(e['bytes'])}  {e['model_name']}" for e in collected["evicted"]]
    pairs = [
        (would, f"{plural(collected['blocks'], 'block')}, {format_bytes(collected['bytes'])}"),
        *([] if collected["dry_run"] else [("disk", f"{format_bytes(collected['freed'])} given back")]),
        ("kept", format_bytes(collected["left"])),
    ]
    if collected["over_quota"]:
        pairs.append(("note", "above the quota: everything that is left is pinned or in use"))
    return [*lines, *fields(pairs)]
