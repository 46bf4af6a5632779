"""Targets: files that strangers hand over or that lie beside keys: artifacts, namespaces, passphrases, texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from p2pkv.artifact.private import NAMESPACE_BYTES
from p2pkv.cli.artifacts import read_node_file
from p2pkv.cli.options import read_text
from p2pkv.cli.passphrase import read_passphrase
from p2pkv.errors import (
    FetchIncompleteError,
    FormatError,
    IntegrityError,
    KeyFileError,
    P2pkvError,
    SignatureError,
    UnknownVersionError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import encode_draft, open_root
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_PASSPHRASE_BYTES
from p2pkv.store import namespaces
from p2pkv.store.arriving import Arriving
from p2pkv.store.car_reading import _NoBlocks, check_car, is_car, read_root
from tests.fuzz.target import Target, hold
from tests.support import samples
from tests.support.cars import Blocks, car
from tests.support.memory_file import file_in_memory
from tests.support.private import make_private

OpenRoot: TypeAlias = Callable[[Cid, bytes], Manifest]
_REFUSALS: Final[tuple[type[P2pkvError], ...]] = (FormatError, IntegrityError, SignatureError, FetchIncompleteError)


def car_file(data: bytes) -> None:
    """A file that holds an artifact begins with its root, and looks like what it is."""
    with file_in_memory(data) as path:
        checked = check_car(path)
        hold((is_car(path), read_root(path), checked.file_bytes), (True, checked.root, len(data)))


def _arrive(open_root: OpenRoot, blocks: Blocks) -> None:
    root, _ = blocks[0]
    arriving = Arriving([root], _NoBlocks(), open_root)
    for cid, data in blocks:
        arriving.add(cid, data)
    hold(arriving.finish(lambda: None).cid, root)


def arriving_root(data: bytes) -> None:
    """A stranger's draft, or a signed manifest of a publisher who lies, over honest nodes and blocks."""
    _arrive(lambda _, root: open_root(root), [(Cid.of_node(data), data), *_BEHIND])


def arriving_node(data: bytes) -> None:
    """A node whose hash stands in the manifest."""
    node = Cid.of_node(data)
    manifest = replace(_PUBLIC, segments=(node,))
    _arrive(lambda *_: manifest, [(_ROOT, b""), (node, data), *_BEHIND[1:]])


def arriving_sealed_node(data: bytes) -> None:
    """The same of a private artifact, whose blocks cannot be looked into."""
    node = Cid.of_node(data)
    manifest = replace(_PRIVATE.manifest, segments=(node,))
    _arrive(lambda *_: manifest, [(_ROOT, b""), (node, data), *_SEALED])


def namespace(data: bytes) -> None:
    with file_in_memory(data) as path:
        hold(len(namespaces._read(path)), NAMESPACE_BYTES)


def passphrase(data: bytes) -> None:
    with file_in_memory(data) as path:
        found = read_passphrase(path)
    hold((data.startswith(found), 0 < len(found) <= MAX_PASSPHRASE_BYTES, b"\n" in found), (True, True, False))


def text(data: bytes) -> None:
    with file_in_memory(data) as path:
        hold(read_text(path).encode(), data)
        hold(read_node_file(path), data)


def _blocks(blocks: dict[Cid, bytes], order: Sequence[Cid]) -> Blocks:
    return [(cid, blocks[cid]) for cid in dict.fromkeys(order)]


_ROOT: Final = Cid.of_node(b"")
_PUBLIC: Final = samples.manifest()
_NODE: Final = samples.segment().encode()
_BEHIND: Final[Blocks] = [
    (Cid.of_node(_NODE), _NODE),
    *((Cid.of_block(data), data) for data in samples.BLOCKS),
]
_DRAFT: Final = encode_draft(_PUBLIC)
_SIGNED: Final = samples.envelope().encode()
_PRIVATE: Final = make_private(samples.TOKEN_IDS)
_SEALED: Final = [(ref.cid, _PRIVATE.blocks[ref.cid]) for ref in _PRIVATE.segment(0).blocks()]
_FILES: Final = tuple(
    car([Cid.of_node(root)], [(Cid.of_node(root), root), *blocks])
    for root, blocks in (
        (_SIGNED, _BEHIND),
        (_DRAFT, _BEHIND),
        (_PRIVATE.envelope.encode(), [*_blocks(_PRIVATE.blocks, _PRIVATE.manifest.segments), *_SEALED]),
    )
)
_HEX: Final = b"00" * NAMESPACE_BYTES

TARGETS: Final = (
    Target("car-file", car_file, _FILES, _REFUSALS),
    Target("arriving-root", arriving_root, (_DRAFT, _SIGNED), _REFUSALS),
    Target("arriving-node", arriving_node, (_NODE,), _REFUSALS),
    Target("arriving-sealed", arriving_sealed_node, (_PRIVATE.blocks[_PRIVATE.manifest.segments[0]],), _REFUSALS),
    Target("namespace", namespace, (b"p2pkv namespace v1\n" + _HEX + b"\n",), (KeyFileError, UnknownVersionError)),
    Target("passphrase", passphrase, (b"correct horse\n", b"correct horse\r\n", b"x"), (UsageError,)),
    Target("text", text, ("Es war einmal \N{SNOWMAN}\n".encode(), b"a"), (UsageError,)),
)
