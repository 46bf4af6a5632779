"""``p2pkv grant`` and ``p2pkv grants``: who may open a private artifact."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_expiry, grant_to
from p2pkv.cli.gc import ManifestArgument, parse_manifest
from p2pkv.cli.key_file import KeyOption, find_key, open_key
from p2pkv.cli.manifest_view import expiry
from p2pkv.cli.options import ExpiresOption, HomeOption, JsonOption, home_of, parse_expiry, read_file
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption
from p2pkv.errors import GrantExpiredError, UsageError, WrongReaderError
from p2pkv.formats.did import decode_did
from p2pkv.formats.grant import KEY_BYTES, Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_STATEMENT_BYTES
from p2pkv.store.files import create_file, os_errors
from p2pkv.store.grants import SUFFIX, GrantFiles, IssuedGrants
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.publisher_key import read_key_file
from p2pkv.store.sequence import next_sequence
from p2pkv.trust.record import succeeded

app = typer.Typer(
    invoke_without_command=True,
    help="List the grants of this home, add one that you were given, or take one away.",
    epilog="Example: p2pkv grants add book.grant",
)


def grant(
    manifest: ManifestArgument,
    reader: Annotated[str, typer.Argument(metavar="DID", help="Who shall read it: the did:key of their home's key.")],
    expires: ExpiresOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. [default: named by both, in this folder]")
    ] = None,
    key: KeyOption = None,
    passphrase_file: PassphraseFileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let somebody open a private artifact that you published.

    Writes a file to be sent to the reader, who adds it with `p2pkv grants add FILE`. It holds the artifact's key, sealed to
    the reader's: others learn from it who may read what, and cannot open the artifact. What a reader has opened cannot be
    taken back: an expiry and `p2pkv grants remove` bind software that obeys them. This home remembers whom it granted what.

    \b
    Example:
      p2pkv grant bafyr4iabc... did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw --expires 30d
    """
    with reporting(as_json) as output:
        place, cid, now = home_of(home), parse_manifest(manifest), time.time()
        end = parse_expiry(expires, now) if expires is not None else None
        decode_did(reader)
        own = GrantFiles(place).get(cid)
        keys = find_key(key, place)
        if own.reader != keys.did:
            raise WrongReaderError(
                f"the grant of {cid} here is for {own.reader}, and the key is that of {keys.did}",
                advice="Name the key of its publisher with --key.",
            )
        signer = open_key(keys, passphrase_file)
        made = grant_to(
            Granted(own, own.artifact_key(signer)),
            reader,
            sequence=next_sequence(keys.path, keys.did, now),
            created=int(now),
            expires=end,
            ephemeral=secrets.token_bytes(KEY_BYTES),
            signers=[*succeeded(own.publisher, HomeTrust(HomeLayout(place)).records)],
        )
        path = give(made, signer, place, out)
        document = {"manifest": str(cid), "reader": reader, "expires": end, "file": str(path)}
        pairs = [("manifest", str(cid)), ("reader", reader), ("expires", expiry(end)), ("file", str(path))]
        output.result(document, fields(pairs))
        output.note(f"The reader runs `p2pkv grants add {path.name}`.")


def give(made: Grant, signer: SigningKey, home: Path, out: Path | None = None) -> Path:
    """Sign a grant, write it to a file for its reader, and remember it; return the file.

    Raises UsageError where there is such a file, DiskFullError, StoreError.
    """
    signed = SignedStatement.sign(made, signer)
    path = (out or Path(f"{str(made.manifest)[-8:]}-{made.reader[-8:]}{SUFFIX}")).expanduser().absolute()
    with os_errors(f"write {path}"):
        try:
            create_file(path, signed.encode())
        except FileExistsError:
            raise UsageError(f"{path} exists and is not overwritten", advice="Name another file with --out.") from None
    IssuedGrants(home).keep(signed)
    return path


@app.callback()
def grants(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the grants of this home: what it may open, and what its publisher let others open.

    \b
    Example:
      p2pkv grants
    """
    if context.invoked_subcommand is not None:
        return
    with reporting(as_json) as output:
        place, now = home_of(home), time.time()
        files = GrantFiles(place)
        rows = [_describe(files.get(manifest), now) for manifest in files]
        issued = [_describe(found, now) for found in IssuedGrants(place).every()]
        lines = [f"{row['manifest']}  {row['standing']}  for {row['reader']}" for row in rows]
        lines += [f"{row['manifest']}  {row['standing']}  issued to {row['reader']}" for row in issued]
        output.result({"grants": rows, "issued": issued}, lines)
        if not lines:
            output.note("There are none. Add what a publisher gave you with `p2pkv grants add FILE`.")


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A grant, as `p2pkv grant` writes it.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a grant that you were given: prompts that begin as its text load it from then on.

    It has to be for the key of this home. The artifact is fetched when a prompt needs it; `p2pkv fetch` brings it at once.

    \b
    Example:
      p2pkv grants add book.grant
    """
    with reporting(as_json) as output:
        place = home_of(home)
        data = read_file(file, MAX_STATEMENT_BYTES, advice="Name a grant, as `p2pkv grant` writes it.")
        found = SignedStatement.decode(data).open(Grant)
        keys = read_key_file(HomeLayout(place).publisher_key)
        if found.reader != keys.did:
            raise WrongReaderError(f"the grant is for {found.reader}, and the key of this home is {keys.did}")
        check_expiry(found, time.time())
        if not keys.encrypted:
            found.artifact_key(keys.open())
        GrantFiles(place).add(data)
        document = _describe(found, time.time())
        names = ("manifest", "publisher", "tokens", "standing")
        output.result(document, fields([(name, str(document[name])) for name in names]))
        output.note(f"If you trust the publisher, run `p2pkv trust add {found.publisher}`.")


@app.command()
def remove(
    manifest: ManifestArgument,
    reader: Annotated[
        str | None, typer.Option("--reader", metavar="DID", help="Forget that this reader was granted it, and keep your own.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a grant away from this home.

    A publisher who removes its own can grant the artifact to nobody any more, nor open it. With --reader it forgets that it
    granted the artifact to that reader, who then gets no grant when it is renewed; what the reader has stays good.

    \b
    Example:
      p2pkv grants remove bafyr4iabc...
      p2pkv grants remove bafyr4iabc... --reader did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw
    """
    with reporting(as_json) as output:
        cid, place = parse_manifest(manifest), home_of(home)
        removed = IssuedGrants(place).forget(cid, reader) if reader is not None else GrantFiles(place).remove(cid)
        output.result({"manifest": str(cid), "removed": removed}, [f"{'removed' if removed else 'there was no grant'}: {cid}"])


def _describe(found: Grant, now: float) -> dict[str, Any]:
    standing = "never expires" if found.expires is None else f"expires {expiry(found.expires)}"
    try:
        check_expiry(found, now)
    except GrantExpiredError:
        standing = "expired"
    return {
        "manifest": str(found.manifest),
        "publisher": found.publisher,
        "reader": found.reader,
        "model_id": found.model_id.hex(),
        "tokens": found.token_count,
        "created": found.created,
        "expires": found.expires,
        "standing": standing,
    }
