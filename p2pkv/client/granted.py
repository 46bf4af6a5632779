"""Grants in a home: which private artifact, of those that its reader was granted, a prompt gets most of.

Nothing of it leaves the process: the daemon hears the manifest CID, and moves ciphertext. The reader's key is the home's
publisher key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_expiry, granted_again
from p2pkv.errors import GrantError, GrantExpiredError, IntegrityError, KeyFileError, WrongReaderError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.statement import SignedStatement
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_key_file

logger = logging.getLogger(__name__)


def reader_key(home: Path) -> SigningKey:
    """Return the key that the grants of ``home`` are sealed to. Raises KeyFileError, UnknownVersionError, StoreError."""
    file = read_key_file(HomeLayout(home).publisher_key)
    if file.encrypted:
        raise KeyFileError(
            f"{file.path} is under a passphrase, and grants cannot be opened with it",
            advice="Give the key (`reader=`, or --passphrase-file), or keep it without a passphrase in a home of its own.",
        )
    return file.open()


def find_granted(
    home: Path,
    model_id: bytes,
    token_ids: Sequence[int],
    now: float,
    reader: SigningKey | None = None,
    shared: int | None = None,
) -> Granted | None:
    """Return the granted artifact that gives most of a prompt, ``None`` where no grant is of a text that begins as it does.

    Of equals the one that was granted last: its manifest is the one that was signed last. ``now`` is in seconds since the
    epoch, ``reader`` the key of the home where its file does not open by itself, ``shared`` as in a prefill. Raises
    GrantExpiredError where the only ones that match are over; KeyFileError, StoreError where there are grants and it cannot be
    known what they match. A grant of another reader is left out.
    """
    grants = GrantFiles(home)
    if not list(grants):
        return None
    expired: GrantExpiredError | None = None
    usable: list[Granted] = []
    for granted in _opened(grants, model_id, reader if reader is not None else reader_key(home)):
        try:
            if granted.begins(token_ids, shared):
                check_expiry(granted.grant, now)
                usable.append(granted)
        except GrantExpiredError as error:
            expired = error
        except IntegrityError as error:
            logger.warning("a grant is left out: %s", error)
    if not usable and expired is not None:
        raise expired
    return max(usable, key=lambda granted: (granted.common_tokens(token_ids), granted.grant.sequence), default=None)


def _opened(grants: GrantFiles, model_id: bytes, reader: SigningKey) -> Iterator[Granted]:
    for manifest in grants:
        grant = grants.get(manifest)
        if grant.model_id != model_id:
            continue
        try:
            granted = Granted(grant, grant.artifact_key(reader))
        except (WrongReaderError, IntegrityError) as error:
            logger.warning("a grant is left out: %s", error)
        else:
            yield granted


def renew_own_grant(home: Path, manifest: Cid, renewed: Cid, publisher: SigningKey, *, sequence: int, created: int) -> None:
    """Keep the publisher's grant to itself of ``manifest`` for ``renewed`` too, the same artifact signed once more.

    Raises GrantMissingError, GrantError where there is none by ``publisher`` to itself, DiskFullError, StoreError.
    """
    grants = GrantFiles(home)
    own, did = grants.get(manifest), encode_did(bytes(publisher.verify_key))
    if {own.publisher, own.reader} != {did}:
        raise GrantError(
            f"the grant of {manifest} here is not the one that its publisher keeps",
            advice="Renew it in the home that published it, or publish it once more.",
        )
    again = granted_again(own, renewed, sequence=sequence, created=created)
    grants.add(SignedStatement.sign(again, publisher).encode())
