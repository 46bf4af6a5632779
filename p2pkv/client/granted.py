"""Which private artifact, of those that this home's reader was granted, a prompt gets most of.

Nothing of it leaves the process: the daemon hears the manifest CID, and moves ciphertext. The reader's key is the home's
publisher key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_expiry
from p2pkv.errors import GrantExpiredError, IntegrityError, KeyFileError, WrongReaderError
from p2pkv.formats.cid import Cid
from p2pkv.limits import SEGMENT_TOKENS
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
    home: Path, model_id: bytes, token_ids: Sequence[int], now: float, reader: SigningKey | None = None
) -> Granted | None:
    """Return the granted artifact that gives most of a prompt, ``None`` where no grant is of a text that begins as it does.

    ``now`` is in seconds since the epoch, ``reader`` the key of the home where its file does not open by itself. Raises
    GrantExpiredError where the only ones that match are over; KeyFileError, StoreError where there are grants and it cannot be
    known what they match. A grant of another reader is left out.
    """
    grants = GrantFiles(home)
    manifests = list(grants)
    if not manifests:
        return None
    best: tuple[int, Granted | None] = 0, None
    expired: GrantExpiredError | None = None
    for granted in _opened(grants, manifests, model_id, reader if reader is not None else reader_key(home)):
        common = granted.common_tokens(token_ids)
        if common < min(SEGMENT_TOKENS, granted.grant.token_count):
            continue
        try:
            check_expiry(granted.grant, now)
        except GrantExpiredError as error:
            expired = error
            continue
        if common > best[0]:
            best = common, granted
    if best[1] is None and expired is not None:
        raise expired
    return best[1]


def _opened(grants: GrantFiles, manifests: Sequence[Cid], model_id: bytes, reader: SigningKey) -> Iterator[Granted]:
    for manifest in manifests:
        grant = grants.get(manifest)
        if grant.model_id != model_id:
            continue
        try:
            granted = Granted(grant, grant.artifact_key(reader))
        except (WrongReaderError, IntegrityError) as error:
            logger.warning("a grant is left out: %s", error)
        else:
            yield granted
