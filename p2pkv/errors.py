"""The one tree of exceptions.

Every error carries a stable ``code`` (the same in the API, the CLI's ``--json``, logs and on the wire), says whose doing it
is (:class:`Fault`), and gives one sentence of ``advice`` that tells the user what to do. The CLI's exit status follows from
the fault. A miss is a value, never an exception.

::

    P2pkvError
    ├── LocalError                  the caller's doing                      exit 2
    │   ├── UsageError              usage
    │   ├── KeyFileError            key.unreadable
    │   ├── WrongPassphraseError    key.passphrase
    │   ├── ModelUnsupportedError   model.unsupported
    │   ├── WrongModelError         model.mismatch
    │   ├── WrongDtypeError         model.dtype
    │   ├── CacheMismatchError      cache.mismatch
    │   └── GrantError              grant.invalid
    │       ├── GrantMissingError   grant.missing
    │       ├── GrantExpiredError   grant.expired
    │       └── WrongReaderError    grant.reader
    ├── RemoteError                 a peer's or a publisher's doing         exit 3
    │   ├── FormatError             format.invalid
    │   │   ├── CidError            format.cid
    │   │   ├── DagCborError        format.dagcbor
    │   │   ├── ManifestError       format.manifest
    │   │   ├── StatementError      format.statement
    │   │   ├── TruncatedError      format.truncated
    │   │   └── UnknownVersionError format.version
    │   ├── IntegrityError          integrity.hash
    │   ├── SignatureError          integrity.signature
    │   ├── WrongValuesError        integrity.values
    │   ├── ProtocolError           wire.protocol
    │   └── PeerUnreachableError    peer.unreachable
    ├── MachineError                disk, network, daemon, clock            exit 4
    │   ├── HomeLockedError         home.locked
    │   ├── StoreError              store.io
    │   ├── DiskFullError           store.full
    │   ├── NotFoundError           artifact.not_found
    │   ├── FetchIncompleteError    fetch.incomplete
    │   ├── DaemonUnreachableError  daemon.unreachable
    │   └── ListenError             node.listen
    └── PolicyError                 your own rules said no                  exit 5
        ├── UntrustedPublisherError trust.untrusted
        ├── RejectedError           trust.rejected
        ├── RevokedError            trust.revoked
        ├── ExpiredError            trust.expired
        ├── SupersededError         trust.superseded
        └── QuorumError             trust.quorum
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final


class Fault(StrEnum):
    """Whose doing an error is; decides the exit status and what a caller does next."""

    LOCAL = "local"
    REMOTE = "remote"
    ENVIRONMENT = "environment"
    POLICY = "policy"


EXIT_STATUS: dict[Fault, int] = {Fault.LOCAL: 2, Fault.REMOTE: 3, Fault.ENVIRONMENT: 4, Fault.POLICY: 5}


class P2pkvError(Exception):
    """Base of everything that p2pkv raises on purpose."""

    code: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = Fault.LOCAL
    default_advice: ClassVar[str] = "Please report this with the command that led here."

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice or self.default_advice

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.advice}"

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.fault]

    def to_dict(self) -> dict[str, str]:
        """Return the form that the control API and ``--json`` show."""
        return {"code": self.code, "fault": self.fault.value, "message": self.message, "advice": self.advice}


class LocalError(P2pkvError):
    code = "local"
    default_advice = "Check the arguments of the call."


class UsageError(LocalError):
    code = "usage"


class KeyFileError(LocalError):
    code = "key.unreadable"
    default_advice = "Create a key with `p2pkv keygen`, or name the right file with --key."


class WrongPassphraseError(LocalError):
    code = "key.passphrase"
    default_advice = "Try again: nothing was changed. Without its passphrase a key cannot be opened by anybody."


class ModelUnsupportedError(LocalError):
    code = "model.unsupported"
    default_advice = "This model cannot share its KV cache exactly; run it without p2pkv."


class WrongModelError(LocalError):
    code = "model.mismatch"
    default_advice = "The artifact belongs to other weights or another config: load the model that it names."


class WrongDtypeError(LocalError):
    code = "model.dtype"
    default_advice = "Load the model with the dtype that the artifact names, or publish an artifact for your dtype."


class CacheMismatchError(LocalError):
    code = "cache.mismatch"
    default_advice = "The cache does not fit this model; nothing was injected. Prefill locally."


class GrantError(LocalError):
    code = "grant.invalid"
    default_advice = "Ask the publisher for a new grant to your did:key, and add it with `p2pkv grants add FILE`."


class GrantMissingError(GrantError):
    code = "grant.missing"
    default_advice = "Ask the publisher for a grant to your did:key, and add it with `p2pkv grants add FILE`."


class GrantExpiredError(GrantError):
    code = "grant.expired"
    default_advice = "Ask the publisher for a new grant; if your clock is wrong, set it."


class WrongReaderError(GrantError):
    code = "grant.reader"
    default_advice = "Use the home that has the reader's key, or ask the publisher for a grant to yours."


class RemoteError(P2pkvError):
    code = "remote"
    fault = Fault.REMOTE
    default_advice = "Nothing of it was used. Try another peer or publisher."


class FormatError(RemoteError):
    code = "format.invalid"
    default_advice = "The bytes do not follow the format and were refused; fetch them again from another source."


class CidError(FormatError):
    code = "format.cid"
    default_advice = "Only CIDv1 with BLAKE3-256 or SHA2-256, raw or dag-cbor, is accepted; check the CID."


class DagCborError(FormatError):
    code = "format.dagcbor"


class ManifestError(FormatError):
    code = "format.manifest"
    default_advice = "The publisher has to build and sign this artifact again."


class StatementError(FormatError):
    code = "format.statement"
    default_advice = "Nothing of it was obeyed. The publisher has to make and sign this statement again."


class TruncatedError(FormatError):
    code = "format.truncated"
    default_advice = "The file or message is cut off; copy or fetch it again."


class UnknownVersionError(FormatError):
    code = "format.version"
    default_advice = "It was written by a newer p2pkv: upgrade, or ask the publisher for version 1."


class IntegrityError(RemoteError):
    code = "integrity.hash"
    default_advice = "The bytes are not what their CID names and were refused; they will be fetched from another peer."


class SignatureError(RemoteError):
    code = "integrity.signature"
    default_advice = "The manifest is not what its publisher signed: do not use it, and fetch it from another source."


class WrongValuesError(RemoteError):
    code = "integrity.values"
    default_advice = "Nothing of it was used. Tell the publisher, or stop trusting it with `p2pkv trust remove <did>`."


class ProtocolError(RemoteError):
    code = "wire.protocol"
    default_advice = "The peer broke the exchange protocol and was disconnected."


class PeerUnreachableError(RemoteError):
    code = "peer.unreachable"
    default_advice = "The peer is gone or cannot be dialled; others are tried."


class MachineError(P2pkvError):
    code = "environment"
    fault = Fault.ENVIRONMENT
    default_advice = "Check this machine's disk, network and clock."


class HomeLockedError(MachineError):
    code = "home.locked"
    default_advice = "Stop that process, or choose another home with P2PKV_HOME."


class StoreError(MachineError):
    code = "store.io"
    default_advice = "Check the disk under the p2pkv home."


class DiskFullError(MachineError):
    code = "store.full"
    default_advice = "Free some space; the transfer goes on from where it stopped."


class NotFoundError(MachineError):
    code = "artifact.not_found"
    default_advice = "Nobody who is reachable has it; check the CID, the bootstrap address and that a provider is running."


class FetchIncompleteError(MachineError):
    code = "fetch.incomplete"
    default_advice = "What arrived is kept: run the same command again to resume when more peers are reachable."


class DaemonUnreachableError(MachineError):
    code = "daemon.unreachable"
    default_advice = "Start one with `p2pkv-node`, or name its home with P2PKV_HOME."


class ListenError(MachineError):
    code = "node.listen"
    default_advice = "Choose another address with --listen; port 0 takes a free one."


class PolicyError(P2pkvError):
    code = "policy"
    fault = Fault.POLICY
    default_advice = "Change the rule if you disagree."


class UntrustedPublisherError(PolicyError):
    code = "trust.untrusted"
    default_advice = "If you know the publisher, run `p2pkv trust add <did>`."


class RejectedError(PolicyError):
    code = "trust.rejected"
    default_advice = "If you disagree with the rule, take it away with `p2pkv trust remove`; `p2pkv trust list` shows it."


class RevokedError(PolicyError):
    code = "trust.revoked"
    default_advice = "Do not use it. Ask the publisher for another artifact of the same text, or prefill locally."


class ExpiredError(PolicyError):
    code = "trust.expired"
    default_advice = "Ask the publisher to renew it; if your clock is wrong, set it."


class SupersededError(PolicyError):
    code = "trust.superseded"
    default_advice = "Nothing is wrong with it: the newer one was taken."


class QuorumError(PolicyError):
    code = "trust.quorum"
    default_advice = (
        "Nothing of it was used. Ask for a smaller quorum, accept more publishers of the text (`p2pkv trust add`), or use "
        "verify=sample or full, which need one."
    )


def error_classes() -> dict[str, type[P2pkvError]]:
    """Return every class of the tree by its code, so that an error crosses a process border unchanged."""
    found: dict[str, type[P2pkvError]] = {}
    pending: list[type[P2pkvError]] = [P2pkvError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


def error_from_dict(fields: Mapping[str, object]) -> P2pkvError:
    """Rebuild the error that :meth:`P2pkvError.to_dict` described; an unknown code becomes the base class.

    A field that is no text is as good as absent: another process wrote them.
    """
    code, message, advice = (value if isinstance(value, str) else None for value in map(fields.get, _TEXTS))
    cls = error_classes().get(code or "", P2pkvError)
    return cls(message or "unknown error", advice=advice)


_TEXTS: Final = ("code", "message", "advice")
