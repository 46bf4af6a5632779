"""Whom this home believes: its rules, and what publishers said of themselves. Whoever decides about an artifact asks here."""

from __future__ import annotations

import logging

from p2pkv.errors import P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.policy import Decision, judge
from p2pkv.trust.record import succeeded
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

    def taken_back(self, cid: Cid, publisher: str, model_id: bytes, sequence: int) -> bool:
        """Return whether its publisher took the artifact ``cid`` back; also where that cannot be read."""
        try:
            record = self.records.get(publisher)
        except P2pkvError as error:
            logger.warning("%s is treated as taken back: %s", cid, error)
            return True
        return record is not None and record.revoking(cid, model_id, sequence) is not None

    def followed(self) -> list[str]:
        """Return all publishers whom this home trusts with something, by a rule or as the successor of one."""
        trusted = trusted_publishers(self.rules.rules())
        return [*dict.fromkeys(did for publisher in trusted for did in succeeded(publisher, self.records))]
