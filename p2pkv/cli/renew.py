"""``p2pkv renew`` and ``p2pkv announce``: keep what was published usable, and to be found."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.artifact.granting import check_expiry, granted_again
from p2pkv.cli.artifacts import open_source
from p2pkv.cli.gc import ManifestArgument, parse_manifest
from p2pkv.cli.grant import give
from p2pkv.cli.key_file import KeyOption, find_key, open_key
from p2pkv.cli.manifest_view import expiry
from p2pkv.cli.options import ExpiresOption, HomeOption, JsonOption, home_of, parse_expiry
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.progress import FileView, open_progress
from p2pkv.errors import GrantExpiredError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.grant import Grant
from p2pkv.store.grants import IssuedGrants
from p2pkv.store.sequence import next_sequence
from p2pkv.units import plural


def renew(
    manifest: ManifestArgument,
    expires: ExpiresOption = None,
    key: KeyOption = None,
    regrant: Annotated[
        bool,
        typer.Option("--regrant", help="Of a private artifact: grant the new manifest to those who may read the old one."),
    ] = False,
    passphrase_file: PassphraseFileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact again with another expiry, and share it under its new manifest.

    Nothing is computed, and nobody who has the blocks fetches them again: a manifest over the same blocks, with the next
    sequence number, is all that is new. The old one stays valid until it expires. Prints the new manifest CID.

    The grants of a private artifact name its manifest, so its readers need new ones: --regrant writes a file for each reader
    whom this home granted the old one and whose grant has not expired, into this folder, with the expiry that it had.

    \b
    Example:
      p2pkv renew bafyr4iabc... --expires 30d
      p2pkv renew bafyr4iabc... --expires 30d --regrant
    """
    with reporting(as_json, interrupted="Run the command again; the old manifest is as good as before.") as output:
        from p2pkv.client.sync import Client

        place, cid, now = home_of(home), parse_manifest(manifest), time.time()
        end = parse_expiry(expires, now) if expires is not None else None
        keys = find_key(key, place)
        old = Envelope.decode(open_source(str(cid), place).envelope).open()
        if old.publisher != keys.did:
            raise UsageError(
                f"{cid} is signed by {old.publisher}, and the key is that of {keys.did}",
                advice="Name the key of its publisher with --key.",
            )
        if regrant and not old.private:
            raise UsageError("nobody needs a grant of a public artifact", advice="Leave --regrant out.")
        signer = open_key(keys, passphrase_file)
        readers = _readers(place, cid, now) if old.private else []
        with Client(place) as client, open_progress(output) as show:
            client.status()
            sequence = next_sequence(keys.path, keys.did, now)
            new = client.renew(cid, signer, expires=end, sequence=sequence, on_event=FileView(show))
        grants = []
        for issued in readers if regrant else []:
            again = granted_again(issued, new, sequence=next_sequence(keys.path, keys.did, now), created=int(now))
            grants.append({"reader": again.reader, "expires": again.expires, "file": str(give(again, signer, place))})
        document = {
            "manifest": str(new),
            "renews": str(cid),
            "publisher": keys.did,
            "sequence": sequence,
            "renewed_sequence": old.sequence,
            "expires": end,
            "grants": grants,
        }
        pairs = [
            ("manifest", str(new)),
            ("renews", f"{cid}, sequence {old.sequence}"),
            ("publisher", f"{keys.did}, sequence {sequence}"),
            ("expires", expiry(end)),
        ]
        pairs += [("granted", f"to {row['reader']}: {row['file']}") for row in grants]
        output.result(document, fields(pairs))
        if old.private and not regrant:
            output.note(
                f"Its readers can open the old manifest alone, {len(readers)} of whom are known here: run "
                f"`p2pkv grant {new} DID` for each, or give --regrant the next time."
            )
        elif old.private and not grants:
            output.note(f"No reader is known here whose grant lasts; `p2pkv grant {new} DID` makes one.")


def _readers(home: Path, manifest: Cid, now: float) -> list[Grant]:
    """Return the grants that this home issued and that last."""
    lasting: list[Grant] = []
    for issued in IssuedGrants(home).of(manifest):
        with suppress(GrantExpiredError):
            check_expiry(issued, now)
            lasting.append(issued)
    return lasting


def announce(manifest: ManifestArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Announce a stored artifact again now.

    The p2pkv-node announces what it shares by itself, again and again. This is for when it shall not wait: after the network
    was away, or to share what the node fetched as no mirror.

    \b
    Example:
      p2pkv announce bafyr4iabc...
    """
    with reporting(as_json) as output:
        from p2pkv.client.sync import Client

        cid = parse_manifest(manifest)
        with Client(home_of(home)) as client:
            keys = client.announce(cid)
        output.result({"manifest": str(cid), "keys": keys}, [f"{plural(keys, 'key')} of {cid} are being announced"])
