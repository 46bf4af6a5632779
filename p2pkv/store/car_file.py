"""Artifacts as CAR files (``docs/spec/car.md``): written from stored blocks, and read into a store.

Nothing is believed: what is written is whole and hashed again, and what is read is listed when all of it, every block and
node, was checked. Either goes on where it was interrupted: an import by what the store has, an export by the file beside its
target, since the bytes of a CAR follow from the artifact alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pkv.artifact.read import Artifact
from p2pkv.errors import SignatureError, UsageError
from p2pkv.formats.car import encode_header, encode_section, section_size
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import is_draft
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import WORK_LEASE_S
from p2pkv.store.arriving import Arriving
from p2pkv.store.car_reading import open_car
from p2pkv.store.files import os_errors, sync_paths
from p2pkv.store.lease import WorkLease
from p2pkv.store.pack import write_at
from p2pkv.store.progress import Progress, Step, ignore
from p2pkv.store.store import Store
from p2pkv.store.stored_blocks import StoredBlocks, is_intact
from p2pkv.store.whole import open_signed, open_whole
from p2pkv.units import MIB

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


def write_car(
    cid: Cid,
    envelope: bytes,
    blocks: StoredBlocks,
    path: Path,
    on_progress: Progress = ignore,
    open_root: Callable[[bytes], Manifest] = open_signed,
) -> CarArtifact:
    """Write the artifact whose envelope this is to ``path``, which has all of it or is as it was.

    ``open_root`` opens what is no envelope: a draft.

    It is written to ``path`` with ``.part`` behind its name, which is renamed when it is complete and on the disk, and stays
    after an error: the next call goes on behind those of its bytes that are right.

    Raises FetchIncompleteError where ``blocks`` do not hold all of it, UsageError where ``path`` is a folder or another
    export writes it, what open_artifact raises, IntegrityError for a block that is damaged on the disk, DiskFullError,
    StoreError.
    """
    artifact, cids = open_whole(cid, envelope, blocks, open_root)
    total = len(encode_header([cid])) + section_size(len(envelope)) + sum(section_size(blocks.size(part)) for part in cids[1:])
    written = write_pieces(path, _pieces(cid, envelope, cids, blocks), total, on_progress)
    return CarArtifact(artifact, len(cids), written)


def write_pieces(path: Path, pieces: Iterable[bytes], total: int, on_progress: Progress = ignore) -> int:
    """Write a file as :func:`write_car` does, out of ``total`` bytes that come piece by piece; return how many came.

    Raises UsageError, DiskFullError, StoreError, what ``pieces`` raise.
    """
    part = path.with_name(f"{path.name}.part")
    done = synced = 0
    same = True
    with os_errors(f"write {path}"):
        if path.is_dir():
            raise UsageError(f"{path} is a folder", advice="Name a file to write, such as book.car.")
        with _locked(part) as descriptor:
            for piece in pieces:
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
    return done


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


def import_car(
    store: Store, path: Path, *, judge: Callable[[Manifest, Cid], None], on_progress: Progress = ignore
) -> CarArtifact:
    """Read a CAR file, store what of it is not here intact, and list the artifact, durably, once all of it is checked.

    ``judge`` sees the manifest and its CID as soon as the signature is verified, and may raise: nothing is stored before it.
    After an error nothing is listed; what was stored is kept for WORK_LEASE_S, and is not written again by the next call.

    Raises UsageError where ``path`` is no file; FormatError and its kin, IntegrityError, SignatureError for what is no
    artifact of this project, or not a signed one, TruncatedError for a file that is cut off; FetchIncompleteError where blocks
    are missing in file and store; DiskFullError, StoreError.
    """

    def open_root(cid: Cid, data: bytes) -> Manifest:
        if is_draft(data):
            raise SignatureError(f"the artifact in {path} is not signed", advice="Sign it first, with `p2pkv sign`.")
        manifest = Envelope.decode(data).open()
        judge(manifest, cid)
        return manifest

    arriving: Arriving | None = None
    lease: WorkLease | None = None
    new = synced = 0
    with open_car(path) as car:
        for blocks in car.pieces():
            if arriving is None:
                arriving = Arriving(car.roots, store.blocks, open_root)
            for cid, data in blocks:
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
            on_progress(Step.READING, car.done, car.total)
    assert arriving is not None, "a CAR that ends whole has roots"
    artifact = arriving.finish(lambda: on_progress(Step.VERIFYING, car.done, car.total))
    on_progress(Step.SYNCING, car.done, car.total)
    store.blocks.sync(arriving.cids)
    store.index.add_artifact(artifact, range(len(artifact.chain_keys)), durable=True)
    if lease is not None:
        lease.release()
    return CarArtifact(artifact, len(arriving.cids), car.done, new)
