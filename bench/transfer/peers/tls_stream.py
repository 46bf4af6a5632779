"""The limit: one TLS 1.3 connection of the standard library into memory that is there already, and nothing is hashed.

The handshake is done before the clock starts.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from bench.transfer.peers import talk
from p2pkv.units import KIB
from p2pkv_node.bulk_tls import make_certificate

_WRITE_BYTES: Final = 256 * KIB


def _server_context() -> ssl.SSLContext:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + make_certificate(key).public_bytes(
        Encoding.PEM
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:  # `ssl` takes keys from files only
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def seed(data: memoryview) -> None:
    context = _server_context()
    with socket.create_server((talk.HOST, 0)) as listener:
        talk.say(port=listener.getsockname()[1])
        while True:
            plain, _ = listener.accept()
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with context.wrap_socket(plain, server_side=True) as connection:
                if connection.recv(1):  # none: the receiver was ended before it began
                    for start in range(0, len(data), _WRITE_BYTES):
                        connection.sendall(data[start : start + _WRITE_BYTES])


def receive(port: int, size: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # speed is measured, and the other end is our own
    buffer = bytearray(b"\xff") * size  # written, so that its pages are there
    view = memoryview(buffer)
    with context.wrap_socket(socket.create_connection((talk.HOST, port))) as connection:
        talk.say(held_bytes=0)
        talk.hear("go")
        watch = talk.Stopwatch()
        connection.sendall(b"g")
        filled = connection.recv_into(view)
        watch.first_byte()
        while filled < size and (count := connection.recv_into(view[filled:])):
            filled += count
        talk.say(**watch.result())
    talk.hear("verify")
    talk.say(digest=talk.digest([view[:filled]]))


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "seed":
        seed(memoryview(Path(arguments[0]).read_bytes()))
    else:
        (seeder,) = json.loads(arguments[0])
        receive(seeder["port"], int(arguments[1]))


if __name__ == "__main__":
    main()
