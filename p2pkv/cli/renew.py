"""``p2pkv renew`` and ``p2pkv announce``: keep what was published usable, and to be found."""

from __future__ import annotations

import time

from p2pkv.cli.artifacts import open_source
from p2pkv.cli.gc import ManifestArgument, parse_manifest
from p2pkv.cli.keygen import KeyOption, key_path, passphrase_of
from p2pkv.cli.manifest_view import expiry
from p2pkv.cli.options import ExpiresOption, HomeOption, JsonOption, home_of, parse_expiry
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.progress import FileView, open_progress
from p2pkv.errors import UsageError
from p2pkv.formats.envelope import Envelope
from p2pkv.store.publisher_key import read_key_file
from p2pkv.store.sequence import next_sequence
from p2pkv.units import plural


def renew(
    manifest: ManifestArgument,
    expires: ExpiresOption = None,
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact again with another expiry, and share it under its new manifest.

    Nothing is computed, and nobody who has the blocks fetches them again: a manifest over the same blocks, with the next
    sequence number, is all that is new. The old one stays valid until it expires. Prints the new manifest CID. A private
    artifact is not signed again, since its grants name its manifest: publish it once more.

    \b
    Example:
      p2pkv renew bafyr4iabc... --expires 30d
    """
    with reporting(as_json, interrupted="Run the command again; the old manifest is as good as before.") as output:
        from p2pkv.client.sync import Client

        place, cid, now = home_of(home), parse_manifest(manifest), time.time()
        end = parse_expiry(expires, now) if expires is not None else None
        keys = read_key_file(key_path(key, place))
        old = Envelope.decode(open_source(str(cid), place).envelope).open()
        if old.publisher != keys.did:
            raise UsageError(
                f"{cid} is signed by {old.publisher}, and the key is that of {keys.did}",
                advice="Name the key of its publisher with --key.",
            )
        signer = keys.open(passphrase_of(passphrase_file) if keys.encrypted else None)
        with Client(place) as client, open_progress(output) as show:
            client.status()
            sequence = next_sequence(keys.path, keys.did, now)
            new = client.renew(cid, signer, expires=end, sequence=sequence, on_event=FileView(show))
        document = {
            "manifest": str(new),
            "renews": str(cid),
            "publisher": keys.did,
            "sequence": sequence,
            "renewed_sequence": old.sequence,
            "expires": end,
        }
        pairs = [
            ("manifest", str(new)),
            ("renews", f"{cid}, sequence {old.sequence}"),
            ("publisher", f"{keys.did}, sequence {sequence}"),
            ("expires", expiry(end)),
        ]
        output.result(document, fields(pairs))


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
