"""The weights of a checkpoint folder: safetensors read directly, and their digest by name, dtype, shape and bytes.

The digest does not depend on how the tensors are spread over files or in what order they lie. Files are memory mapped, so a
checkpoint may be larger than memory. A digest is remembered beside the files' stamp (names, sizes, times, inodes) in a cache
folder, never in the checkpoint's own; a stamp file that is damaged or does not match is ignored.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from p2pkv.errors import FormatError, ModelUnsupportedError, StoreError, TruncatedError
from p2pkv.formats.hashing import DIGEST_BYTES, digest, domain_hash
from p2pkv.limits import MAX_CHECKPOINT_JSON_BYTES

_WEIGHTS_DOMAIN: Final = "p2pkv/weights/v1"
_LENGTH_BYTES: Final = 8
_ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
# A file that changed this recently may change again without a new time stamp: its digest is not remembered.
_SETTLED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its safetensors dtype (``BF16``), shape, and where its bytes lie in which file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or the shards that its index names.

    Raises ModelUnsupportedError where there are none, FormatError for an index that leads out of the folder.
    """
    single = folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    index = folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        raise ModelUnsupportedError(
            f"no {stem}.safetensors in {folder}",
            advice="Save the model with `save_pretrained`, which writes safetensors.",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index.name} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    if any(Path(name).name != name for name in names):
        raise FormatError(f"{index.name} names files outside its folder")
    return [folder / name for name in sorted(names)]


def read_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors ``files`` by name. Raises FormatError, TruncatedError, StoreError."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise FormatError(f"tensor {tensor.name} stands in two files: {tensors[tensor.name].file.name}, {file.name}")
            tensors[tensor.name] = tensor
    return tensors


def digest_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    """Return the weights digest over ``(name, safetensors dtype, shape, BLAKE3 of the little-endian bytes)`` in any order."""
    parts: list[bytes] = []
    for name, dtype, shape, content in sorted(tensors):
        sizes = b"".join(size.to_bytes(8, "little") for size in shape)
        parts += (name.encode(), dtype.encode(), sizes, content)
    return domain_hash(_WEIGHTS_DOMAIN, *parts)


def weights_digest(files: Iterable[Path]) -> bytes:
    """Return the 32-byte digest over all tensors of ``files``, streamed. Raises FormatError, TruncatedError, StoreError."""
    tensors = read_tensors(files)
    described: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for file in {tensor.file for tensor in tensors.values()}:
        with open_mapped(file) as mapped, memoryview(mapped) as data:
            described += [
                (tensor.name, tensor.dtype, tensor.shape, _parallel_digest(data[tensor.start : tensor.end]))
                for tensor in tensors.values()
                if tensor.file == file
            ]
    return digest_tensors(described)


def cached_weights_digest(files: list[Path], cache_folder: Path) -> bytes:
    """Return :func:`weights_digest` of ``files``, from ``cache_folder`` where the files are what they were then."""
    before = _stamp(files)
    slot = cache_folder / "weights" / f"{digest(str(files[0].resolve()).encode()).hex()}.json"
    known = _read_slot(slot, before)
    if known is not None:
        return known
    result = weights_digest(files)
    settled = time.time() - max(file.stat().st_mtime for file in files) > _SETTLED_S
    if settled and _stamp(files) == before:
        _write_slot(slot, before, result)
    return result


def read_json(path: Path) -> dict[str, object]:
    """Return a JSON object from ``path``. Raises StoreError where it cannot be read, FormatError where it is none."""
    try:
        if path.stat().st_size > MAX_CHECKPOINT_JSON_BYTES:
            raise FormatError(f"{path.name} exceeds {MAX_CHECKPOINT_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", advice="Check the checkpoint folder.") from None
    return _parse_json(data, path.name)


def open_mapped(file: Path) -> mmap.mmap:
    """Map ``file`` privately: what is written to the map never reaches the file. Raises StoreError, TruncatedError."""
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}", advice="Check the checkpoint folder.") from None
    except ValueError:  # an empty file cannot be mapped
        raise TruncatedError(f"{file.name} is empty") from None


def _read_header(file: Path) -> Iterator[StoredTensor]:
    with open_mapped(file) as mapped:
        size = len(mapped)
        length = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
        if length > MAX_CHECKPOINT_JSON_BYTES:
            raise FormatError(f"{file.name}: a header of {length} bytes exceeds {MAX_CHECKPOINT_JSON_BYTES}")
        base = _LENGTH_BYTES + length
        if size < base:
            raise TruncatedError(f"{file.name} ends in its header")
        header = _parse_json(mapped[_LENGTH_BYTES:base], file.name)
    for name, entry in header.items():
        if name != "__metadata__":
            yield _stored_tensor(name, entry, file, base, size)


def _stored_tensor(name: str, entry: object, file: Path, base: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if all(
            isinstance(item, int) and item >= 0 for item in shape
        ):
            pass
        case _:
            raise FormatError(f"{file.name}: tensor {name} has no dtype, shape and offsets")
    if dtype not in _ITEM_BYTES:
        raise ModelUnsupportedError(f"tensor {name} has the dtype {dtype}, which is not known")
    if not 0 <= start <= end or end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise FormatError(f"{file.name}: tensor {name} does not fill its {end - start} bytes")
    if base + end > size:
        raise TruncatedError(f"{file.name} ends in tensor {name}")
    return StoredTensor(name, dtype, tuple(shape), file, base + start, base + end)


def _parse_json(data: bytes, name: str) -> dict[str, object]:
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise FormatError(f"{name} is not JSON, or repeats a key") from None
    if not isinstance(value, dict):
        raise FormatError(f"{name} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Two readers of a repeated key may see different values: refuse it."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("repeated key")
    return result


def _parallel_digest(data: memoryview) -> bytes:
    return blake3(data, max_threads=blake3.AUTO).digest()


def _stamp(files: list[Path]) -> list[list[str | int]]:
    try:
        found = [(file.name, file.stat()) for file in files]
    except OSError as error:
        raise StoreError(f"cannot read {error.filename}: {error.strerror}", advice="Check the checkpoint folder.") from None
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in found]


def _read_slot(slot: Path, stamp: list[list[str | int]]) -> bytes | None:
    try:
        held = json.loads(slot.read_bytes())
        result = bytes.fromhex(held["weights"])
        return result if held["stamp"] == stamp and len(result) == DIGEST_BYTES else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # absent or damaged: the digest is computed again
        return None


def _write_slot(slot: Path, stamp: list[list[str | int]], result: bytes) -> None:
    """Remember a digest, whole or not at all. Where the folder cannot be written, nothing is remembered."""
    with suppress(OSError):
        slot.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=slot.parent)
        try:
            with os.fdopen(handle, "w") as staged:
                json.dump({"stamp": stamp, "weights": result.hex()}, staged)
            Path(name).replace(slot)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
