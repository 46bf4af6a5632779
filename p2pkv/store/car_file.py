"""Artifacts as CAR files (``docs/spec/car.md``): written from stored blocks, and read into a store.

Nothing is believed: what is written is whole and hashed again, and what is read is listed when all of it, every block and
node, was checked. Either goes on where it was interrupted: an import by what the store has, an export by the file beside its
target, since the bytes of a CAR follow from the artifact alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import FetchIncompleteError, FormatError, UsageError
from p2pkv.formats.car import CarDecoder, encode_header, encode_section, section_size
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import WORK_LEASE_S
from p2pkv.store.files import os_errors, sync_paths
from p2pkv.store.lease import WorkLease
from p2pkv.store.pack import write_at
from p2pkv.store.progress import Progress, Step, ignore
from p2pkv.store.store import Store
from p2pkv.store.stored_blocks import StoredBlocks, is_intact
from p2pkv.store.whole import open_whole
from p2pkv.units import MIB

# A few system calls for each MiB, and little to hold.
_PIECE_BYTES: Final = MIB
# So much is on its way to the disk at most, so that the last sync is short, and ending the work does not wait for long.
_SYNC_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class CarArtifact:
    """An artifact that went into a CAR file or came out of one. ``blocks`` counts all of it, ``file_bytes`` is its size.

    ``new_bytes`` are the bytes of blocks and nodes that a home lacked, and 0 for an artifact that was written.
    """

    artifact: Artifact
    blocks: int
    file_bytes: int
    new_bytes: int = 0


# --- writing -----------------------------------------------------------------------------------------------------------


def write_car(cid: Cid, envelope: bytes, blocks: StoredBlocks, path: Path, on_progress: Progress = ignore) -> CarArtifact:
    """Write the artifact whose envelope this is to ``path``, which has all of it or is as it was.

    It is written to ``path`` with ``.part`` behind its name, which is renamed when it is complete and on the disk, and stays
    after an error: the next call goes on behind those of its bytes that are right.

    Raises FetchIncompleteError where ``blocks`` do not hold all of it, UsageError where ``path`` is a folder or another
    export writes it, what open_artifact raises, IntegrityError for a block that is damaged on the disk, DiskFullError,
    StoreError.
    """
    artifact, cids = open_whole(cid, envelope, blocks)
    total = len(encode_header([cid])) + section_size(len(envelope)) + sum(section_size(blocks.size(part)) for part in cids[1:])
    part = path.with_name(f"{path.name}.part")
    done = synced = 0
    same = True
    with os_errors(f"write {path}"):
        if path.is_dir():
            raise UsageError(f"{path} is a folder", advice="Name a file to write, such as book.car.")
        with _locked(part) as descriptor:
            for piece in _pieces(cid, envelope, cids, blocks):
                same = same and os.pread(descriptor, len(piece), done) == piece
                if not same:
                    write_at(descriptor, [piece], done)
                done += len(piece)
                if done - synced >= _SYNC_BYTES:
                    os.fsync(descriptor)
                    synced = done
                on_progress(Step.COMPARING if same else Step.WRITING, done, total)
            on_progress(Step.SYNCING, done, total)
            os.ftruncate(descriptor, done)
            os.fsync(descriptor)
            os.replace(part, path)
        sync_paths([os.fspath(path.parent)])
    return CarArtifact(artifact, len(cids), done)


def export_car(store: Store, manifest: Cid, path: Path, on_progress: Progress = ignore) -> CarArtifact:
    """Write an artifact of ``store``, which keeps it meanwhile; see :func:`write_car`. Raises NotFoundError as well."""
    lease = WorkLease(store.holds, manifest, WORK_LEASE_S)
    try:
        return write_car(manifest, store.read(manifest), store.blocks, path, lease.kept_by(on_progress))
    finally:
        lease.release()


def _pieces(cid: Cid, envelope: bytes, cids: Sequence[Cid], blocks: StoredBlocks) -> Iterator[bytes]:
    """Yield the bytes of the file, section by section."""
    yield encode_header([cid])
    for part in cids:
        yield encode_section(part, envelope if part == cid else blocks.read(part))


@contextmanager
def _locked(part: Path) -> Iterator[int]:
    """Open a file that may be there, for this export alone. Raises UsageError, OSError."""
    while True:
        # A pipe that was put there must not be waited for, nor a link be followed.
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"{part} is no file", advice="Move it away, or name another file to write.")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{part} is being written", advice="Wait for the other export, or name another file."
                ) from None
            if _is_at(descriptor, part):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at ``path``: another export may have renamed it just now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


# --- reading -----------------------------------------------------------------------------------------------------------


def import_car(store: Store, path: Path, *, judge: Callable[[Manifest], None], on_progress: Progress = ignore) -> CarArtifact:
    """Read a CAR file, store what of it is not here intact, and list the artifact, durably, once all of it is checked.

    ``judge`` sees the manifest as soon as its signature is verified, and may raise: nothing is stored before it. After an
    error nothing is listed; what was stored is kept for WORK_LEASE_S, and is not written again by the next call.

    Raises UsageError where ``path`` is no file; FormatError and its kin, IntegrityError, SignatureError for what is no
    artifact of this project, TruncatedError for a file that is cut off; FetchIncompleteError where blocks are missing in file
    and store; DiskFullError, StoreError.
    """
    decoder = CarDecoder()
    arriving: _Arriving | None = None
    lease: WorkLease | None = None
    new = done = synced = 0
    with os_errors(f"read {path}"), _opened(path) as descriptor:
        total = os.fstat(descriptor).st_size
        while piece := os.read(descriptor, _PIECE_BYTES):
            blocks = decoder.feed(piece)
            if arriving is None and decoder.roots:
                arriving = _Arriving(decoder.roots, store.blocks, judge)
            for cid, data in blocks:
                assert arriving is not None, "blocks come behind the roots"
                arriving.add(cid, data)
                if lease is None:
                    lease = WorkLease(store.holds, arriving.root, WORK_LEASE_S)
                    on_progress = lease.kept_by(on_progress)
                if not is_intact(store.blocks, cid):
                    store.write(cid, data)
                    new += len(data)
                    if new - synced >= _SYNC_BYTES:
                        store.blocks.sync([cid])
                        synced = new
            done += len(piece)
            on_progress(Step.READING, done, total)
    decoder.end()
    assert arriving is not None, "a CAR that ends whole has roots"
    artifact = arriving.finish(lambda: on_progress(Step.VERIFYING, done, total))
    on_progress(Step.SYNCING, done, total)
    store.blocks.sync(arriving.cids)
    store.index.add_artifact(artifact, range(len(artifact.chain_keys)), durable=True)
    if lease is not None:
        lease.release()
    return CarArtifact(artifact, len(arriving.cids), done, new)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file to be read. Raises UsageError, OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_file(path) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _no_file(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _no_file(path: Path) -> UsageError:
    return UsageError(
        f"there is no file {path}", advice="Name a CAR file, as `p2pkv export` writes it, that the node can see."
    )


class _Arriving:
    """An artifact while its blocks come: lets in what a block before it names, and sees in the end that nothing is missing.

    So a file cannot fill the disk with blocks that belong to nothing.
    """

    def __init__(self, roots: Sequence[Cid], stored: StoredBlocks, judge: Callable[[Manifest], None]) -> None:
        if len(roots) != 1:
            raise FormatError(f"the CAR has {len(roots)} roots, an artifact has one")
        if roots[0].codec is not Codec.DAG_CBOR:
            raise FormatError("the root of the CAR is a block, and not an envelope")
        self.root = roots[0]
        self._stored = stored
        self._judge = judge
        self._manifest: Manifest | None = None
        self._artifact: Artifact | None = None
        self._nodes: dict[Cid, int] = {}  # those that are still to be opened, and which segments they are
        self._missing: dict[Cid, None] = {}
        self._named: dict[Cid, None] = {self.root: None}

    @property
    def cids(self) -> Sequence[Cid]:
        """All that belongs to the artifact, as far as it is known; the envelope comes first."""
        return tuple(self._named)

    def add(self, cid: Cid, data: bytes) -> None:
        """Take a block whose hash is verified. Raises as :func:`import_car`."""
        if cid not in self._named:
            self._open_stored()
        if cid not in self._named:
            raise FormatError(f"{cid} is neither the root of the CAR nor named by a block before it")
        self._missing.pop(cid, None)
        if self._manifest is None:
            self._manifest = Envelope.decode(data).open()
            self._judge(self._manifest)
            self._nodes = {node: index for index, node in enumerate(self._manifest.segments)}
            tokens = self._manifest.tokens.cid
            self._name([*([tokens] if tokens is not None else []), *self._manifest.segments])
        elif self._artifact is None and cid == self._manifest.tokens.cid:
            self._artifact = open_manifest(self.root, self._manifest, data)
        elif cid in self._nodes:
            self._open(cid, data)

    def finish(self, go_on: Callable[[], None]) -> Artifact:
        """Return the artifact, once all of it came or is stored; ``go_on`` is called often. Raises as :func:`import_car`."""
        if self._manifest is None:
            raise FormatError("the CAR does not hold its root")
        self._open_stored()
        missing = 0
        for cid in self._missing:
            missing += not is_intact(self._stored, cid)
            go_on()
        if missing:
            raise FetchIncompleteError(
                f"the CAR lacks {missing} blocks or segment nodes that are not stored here either",
                advice="Nothing was taken over. Export it again where it is whole.",
            )
        return self._opened()

    def _opened(self) -> Artifact:
        """Return the artifact with its token ids verified, out of a block that is stored where none came."""
        assert self._manifest is not None, "nodes come behind the manifest"
        if self._artifact is None:
            cid = self._manifest.tokens.cid
            if cid is not None and not is_intact(self._stored, cid):
                raise FormatError(f"the block of the token ids, {cid}, does not come before the segment nodes")
            self._artifact = open_manifest(self.root, self._manifest, self._stored.read(cid) if cid is not None else None)
        return self._artifact

    def _open(self, node: Cid, data: bytes) -> None:
        segment = self._opened().open_segment(self._nodes.pop(node), data)
        self._missing.pop(node, None)
        self._name([ref.cid for ref in segment.blocks()])

    def _open_stored(self) -> None:
        """Open the nodes that are stored, of those that did not come."""
        for node in [*self._nodes]:
            if is_intact(self._stored, node):
                self._open(node, self._stored.read(node))

    def _name(self, cids: Sequence[Cid]) -> None:
        fresh = dict.fromkeys(cid for cid in cids if cid not in self._named)
        self._named |= fresh
        self._missing |= fresh
