"""``p2pkv revoke`` and ``p2pkv rotate``: take back what was signed, and go on with another key. Neither needs a network.

Both keep a signed statement in the home, where its node finds it, obeys it, announces it and tells it to whoever asks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from nacl.signing import SigningKey

from p2pkv.cli.gc import parse_manifest
from p2pkv.cli.key_file import KeyOption, find_key, open_key
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.cli.trust import parse_model
from p2pkv.errors import UsageError
from p2pkv.formats.did import encode_did
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.succession import Succession
from p2pkv.limits import MAX_REASON_BYTES
from p2pkv.store.files import os_errors, replace_file
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import KeyFile, read_key_file
from p2pkv.store.sequence import next_sequence
from p2pkv.store.statement_files import StatementFiles
from p2pkv.trust.record import Record
from p2pkv.units import plural

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the statement to this file too, to carry it by hand."),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for whoever meets it; it is signed and public.")]


def revoke(
    manifest: Annotated[
        str | None, typer.Argument(metavar="[MANIFEST]", help="Manifest CID of the artifact to take back.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="ID", help="Take back all of this model id.")] = None,
    before: Annotated[
        int | None, typer.Option(metavar="SEQUENCE", min=1, help="Take back all with a lower sequence number.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Take back the key: all it ever signed or signs, and its succession.")
    ] = False,
    reason: ReasonOption = "",
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    out: OutOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back what you signed: one artifact, all of a model, all before a sequence number, or the key.

    It cannot be undone: what is on the list stays there. The node of this home obeys it within seconds, announces it and
    tells it to those who ask; nodes that trust you ask every half hour, and obey it from then on, also without a network.
    Who has the KV already keeps it: nobody can take bytes back.

    \b
    Example:
      p2pkv revoke bafyr4iabc... --reason "made with the wrong tokenizer"
      p2pkv revoke --everything --reason "the key was on a stolen laptop"
    """
    with reporting(as_json) as output:
        item = Revoked(*_scope(manifest, model, before, everything), reason)
        _check_reason(reason)
        place, now = home_of(home), time.time()
        keys, signer = _key(key, passphrase_file, place)
        files = StatementFiles(HomeLayout(place).statements)
        record = files.get(keys.did, Record(keys.did))
        news = item.key not in {known.key for known in record.items}
        if news:
            sequence = next_sequence(keys.path, keys.did, now, above=record.sequence)
            signed = SignedStatement.sign(record.next_list(item, int(now), sequence), signer)
            files.hear(signed)
        else:
            signed = record.lists[-1].signed
        listed = signed.open(Revocations)
        _write(out, signed)
        document: dict[str, Any] = {
            "publisher": keys.did,
            "scope": item.scope.value,
            "revoked": _shown(item),
            "reason": reason,
            "sequence": listed.sequence,
            "items": len(listed.items),
            "added": news,
        }
        pairs = [
            ("revoked" if news else "revoked already", f"{item.scope.value} {_shown(item)}"),
            ("publisher", keys.did),
            ("list", f"number {listed.sequence}, {plural(len(listed.items), 'item')}"),
        ]
        output.result(document, fields(pairs))


def rotate(
    to: Annotated[Path, typer.Option("--to", metavar="NEWKEY", help="File of the new key, as `p2pkv keygen --out` made it.")],
    reason: ReasonOption = "",
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    new_passphrase_file: Annotated[
        Path | None, typer.Option("--new-passphrase-file", metavar="FILE", help="As --passphrase-file, for the new key.")
    ] = None,
    out: OutOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with another key: the old one names it, and both sign that.

    Whoever trusts the old key trusts the new one from when it hears of it. What the old key signed stays as good as it was;
    what it signs from now on is refused. Sign with the new key from here on, and destroy the old one.

    A key has one successor. This helps against a key that grows old, not against one that is stolen: a thief can do the same.
    Run `p2pkv revoke --everything` for a stolen key, and ask those who trust you to trust the new one.

    \b
    Example:
      p2pkv keygen --out new.key
      p2pkv rotate --to new.key --reason "yearly change of keys"
    """
    with reporting(as_json) as output:
        _check_reason(reason)
        place, now = home_of(home), time.time()
        keys, signer = _key(key, passphrase_file, place)
        new_file = read_key_file(to.expanduser().absolute())
        if new_file.did == keys.did:
            raise UsageError("the new key is the old one", advice="Make another with `p2pkv keygen --out FILE`.")
        files = StatementFiles(HomeLayout(place).statements)
        record = files.get(keys.did, Record(keys.did))
        if record.burnt is not None:
            raise UsageError(
                f"{keys.did} was taken back: nobody follows it", advice="Publish with the new key, and ask others to trust it."
            )
        if record.successions:
            successor = record.successions[0].opened.successor
            raise UsageError(
                f"{keys.did} was replaced by {successor} already",
                advice="A second successor would make others trust neither: rotate that key.",
            )
        new = open_key(new_file, new_passphrase_file)
        last = next_sequence(keys.path, keys.did, now)
        statement = Succession.agreed(keys.did, new, last=last, created=int(now), reason=reason)
        signed = SignedStatement.sign(statement, signer)
        files.hear(signed)
        _write(out, signed)
        new_did = encode_did(bytes(new.verify_key))
        document = {"publisher": keys.did, "successor": new_did, "last": last, "reason": reason}
        pairs = [("replaced", keys.did), ("by", new_did), ("last sequence", str(last))]
        output.result(document, fields(pairs))
        output.note(f"Sign with --key {to} from now on.")


def _scope(
    manifest: str | None, model: str | None, before: int | None, everything: bool
) -> tuple[Scope, Any]:  # the type of what is taken back follows from the scope
    given = [choice for choice in (manifest, model, before, everything or None) if choice is not None]
    if len(given) != 1:
        raise UsageError(
            "say one thing to take back", advice="Name a manifest CID, or give one of --model, --before and --everything."
        )
    if manifest is not None:
        return Scope.MANIFEST, parse_manifest(manifest)
    if model is not None:
        model_id = parse_model(model)
        if model_id is None or len(model_id) != DIGEST_BYTES:
            raise UsageError(f"{model!r} is no model id", advice="`p2pkv inspect` shows the id of a model.")
        return Scope.MODEL, model_id
    return Scope.BEFORE, EVERYTHING if everything else before


def _shown(item: Revoked) -> str:
    if item.everything:
        return "everything"
    return item.what.hex() if isinstance(item.what, bytes) else str(item.what)


def _check_reason(reason: str) -> None:
    if len(reason.encode()) > MAX_REASON_BYTES:
        raise UsageError(f"a reason of more than {MAX_REASON_BYTES} bytes", advice="Say it shorter.")


def _key(path: Path | None, passphrase_file: Path | None, home: Path) -> tuple[KeyFile, SigningKey]:
    file = find_key(path, home)
    return file, open_key(file, passphrase_file)


def _write(path: Path | None, signed: SignedStatement) -> None:
    if path is not None:
        with os_errors(f"write {path}"):
            replace_file(path.expanduser().absolute(), signed.encode())
