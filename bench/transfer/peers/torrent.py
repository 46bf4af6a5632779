"""libtorrent: a v1 torrent of one file in pieces of 1 MiB, plain TCP, all that is not the transfer switched off.

The receiver's torrent is checked and waits before the clock starts; then it is told of the seeders. It verifies each piece
(SHA-1) by itself and writes to a file.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Final

import libtorrent as lt

from bench.transfer.peers import talk
from p2pkv.units import MIB

# Asking more often would cost the transfer more than it tells.
_POLL_S: Final = 0.005
_STATES: Final = lt.torrent_status.states
_SETTINGS: Final[lt.settings_pack] = {
    "listen_interfaces": f"{talk.HOST}:0",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "in_enc_policy": 2,  # no encryption
    "out_enc_policy": 2,
    "alert_mask": 0,
    "allow_multiple_connections_per_ip": True,  # all seeders have one address
}


def make_torrent(path: Path) -> bytes:
    files = lt.file_storage()
    files.add_file(path.name, path.stat().st_size)
    torrent = lt.create_torrent(files, MIB, lt.create_torrent.v1_only)
    lt.set_piece_hashes(torrent, str(path.parent))
    return lt.bencode(torrent.generate())


def add(session: lt.session, torrent: bytes, folder: Path, flags: int) -> lt.torrent_handle:
    params = lt.add_torrent_params()
    params.ti = lt.torrent_info(torrent)
    params.save_path = str(folder)
    params.flags = flags
    return session.add_torrent(params)


def await_state(handle: lt.torrent_handle, state: int) -> None:
    while handle.status(0).state != state:
        time.sleep(_POLL_S)


def seed(path: Path) -> None:
    torrent = make_torrent(path)
    session = lt.session(_SETTINGS)
    await_state(add(session, torrent, path.parent, lt.torrent_flags.seed_mode), _STATES.seeding)
    talk.say(port=session.listen_port(), torrent=base64.b64encode(torrent).decode())
    talk.stay()


def receive(ports: list[int], torrent: bytes, output: Path) -> None:
    session = lt.session(_SETTINGS)
    handle = add(session, torrent, output, 0)
    await_state(handle, _STATES.downloading)
    talk.say(held_bytes=0)  # the data lie in the page cache
    talk.hear("go")
    watch = talk.Stopwatch()
    for port in ports:
        handle.connect_peer((talk.HOST, port))
    while not (status := handle.status(0)).is_seeding:
        if status.total_payload_download:
            watch.first_byte()
        time.sleep(_POLL_S)
    talk.say(**watch.result())
    talk.hear("verify")
    del handle, session  # writes what is still in memory
    (file,) = output.iterdir()
    talk.say(digest=talk.file_digest(file))


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "seed":
        seed(Path(arguments[0]))
    else:
        seeders = json.loads(arguments[0])
        receive([seeder["port"] for seeder in seeders], base64.b64decode(seeders[0]["torrent"]), Path(arguments[2]))


if __name__ == "__main__":
    main()
