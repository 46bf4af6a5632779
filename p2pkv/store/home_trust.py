"""Whom this home believes: its rules, and what publishers said of themselves. Whoever decides about an artifact asks here."""

from __future__ import annotations

import logging

from p2pkv.errors import P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.policy import Decision, judge, revoked
from p2pkv.trust.record import Record, holder, succeeded
from p2pkv.trust.rules import trusted_publishers

logger = logging.getLogger(__name__)


class HomeTrust:
    """The rules and the records of one home. Every method may be called from any thread."""

    def __init__(self, layout: HomeLayout) -> None:
        self.rules = TrustFile(layout.trust)
        self.records = StatementFiles(layout.statements)

    def judge(self, manifest: Manifest, cid: Cid, now: float, *, newest: int | None = None) -> Decision:
        """Decide about the artifact ``cid`` as :func:`p2pkv.trust.policy.judge` does.

        Raises StoreError, UnknownVersionError where rules or records cannot be read: then nothing may be used.
        """
        return judge(manifest, cid, self.rules.rules(), self.records, now, newest=newest)

    def revoked(self, cid: Cid, publisher: str, model_id: bytes, sequence: int) -> P2pkvError | None:
        """Return why the artifact ``cid`` must not be used, ``None`` where its publisher did not take it back.

        Where that cannot be read, the reason is why not.
        """
        try:
            return revoked(self.records.get(publisher, Record(publisher)), cid, model_id, sequence)
        except P2pkvError as error:
            logger.warning("%s is treated as taken back: %s", cid, error)
            return error

    def taken_back(self, cid: Cid, publisher: str, model_id: bytes, sequence: int) -> bool:
        """Return whether its publisher took the artifact ``cid`` back; also where that cannot be read."""
        return self.revoked(cid, publisher, model_id, sequence) is not None

    def holder(self, publisher: str) -> str:
        """Return who a publisher is by now (:func:`p2pkv.trust.record.holder`). Raises StoreError, UnknownVersionError."""
        return holder(publisher, self.records)

    def followed(self) -> list[str]:
        """Return all publishers whom this home trusts with something, by a rule or as the successor of one.

        Raises StoreError, UnknownVersionError.
        """
        trusted = trusted_publishers(self.rules.rules())
        return [*dict.fromkeys(did for publisher in trusted for did in succeeded(publisher, self.records))]
