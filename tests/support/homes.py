"""What tests do to the home of a node from outside."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from math import inf
from pathlib import Path

from bench.artifacts import PUBLISHER
from p2pkv.store.home import HomeLayout
from p2pkv.store.trust_file import TrustFile

_TABLES_OF_THE_FIRST_VERSION = ("artifacts", "segments")


def trust_publisher(home: Path) -> None:
    """Let ``home`` trust the publisher of the benches' artifacts; it is created where missing."""
    layout = HomeLayout(home)
    layout.create()
    TrustFile(layout.trust).add(PUBLISHER, "", int(time.time()))


def make_older(home: Path) -> bool:
    """Give the index of ``home`` the schema of the first version, which has no pins and leases; return whether there is one.

    No process may have it open.
    """
    path = HomeLayout(home).index
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        newer = [name for name in tables if name not in _TABLES_OF_THE_FIRST_VERSION]
        connection.executescript("".join(f"DROP TABLE {name};" for name in newer) + "PRAGMA user_version = 1;")
    return True


def expire_leases(home: Path, within_s: float = inf) -> None:
    """Let the leases end that would within so many seconds, as if these had passed. A node may be running."""
    path = HomeLayout(home).index
    if path.exists():
        with closing(sqlite3.connect(path)) as connection, connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'leases'").fetchone():  # none in an older index
                connection.execute("UPDATE leases SET expires = 0 WHERE expires <= ?", (time.time() + within_s,))
