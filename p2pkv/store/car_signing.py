"""Put an envelope in the place of the root of a CAR file: of a draft, or of an envelope that an earlier signature made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from p2pkv.artifact.signing import check_fits
from p2pkv.formats.car import encode_header, encode_section, section_size
from p2pkv.formats.draft import encode_draft
from p2pkv.formats.envelope import Envelope
from p2pkv.store.car_file import CarArtifact, write_pieces
from p2pkv.store.car_reading import CheckedCar, open_car
from p2pkv.store.progress import Progress, ignore


def write_signed(
    car: CheckedCar, source: Path, envelope: Envelope, target: Path, on_progress: Progress = ignore
) -> CarArtifact:
    """Write the artifact of ``source``, which is checked, under ``envelope`` to ``target``; the two may be the same file.

    ``target`` has all of it or is as it was. Raises ManifestError where the envelope signs another artifact, what
    :func:`p2pkv.store.car_file.write_pieces` and reading a CAR raise.
    """
    check_fits(envelope, encode_draft(car.artifact.manifest))
    head = encode_header([envelope.cid]) + encode_section(envelope.cid, envelope.encode())
    old = len(encode_header([car.cid])) + section_size(len(car.root))

    def pieces() -> Iterator[bytes]:
        yield head
        with open_car(source) as reader:
            for blocks in reader.pieces():
                for cid, data in blocks:
                    if cid != car.cid:
                        yield encode_section(cid, data)

    written = write_pieces(target, pieces(), car.file_bytes - old + len(head), on_progress)
    return CarArtifact(car.artifact, car.blocks, written)
