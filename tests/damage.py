"""What can befall the database of a home that nobody serves."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def database_files(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("muster.db*") if path.suffix != ".lock")


def delete(home: Path) -> None:
    for path in database_files(home):
        path.unlink()


def empty_file(home: Path) -> None:
    delete(home)
    (home / "muster.db").touch(mode=0o600)


def empty_tables(home: Path) -> None:
    _delete_from(home, "objects", "records", "events", "changes")


def forget_trainings(home: Path) -> None:
    _delete_from(home, "objects")


def _delete_from(home: Path, *tables: str) -> None:
    with sqlite3.connect(home / "muster.db") as database:
        for table in tables:
            database.execute(f"DELETE FROM {table}")
    database.close()


def overwrite(home: Path) -> None:
    delete(home)
    (home / "muster.db").write_bytes(b"not a database" * 1000)


def cut_file(home: Path) -> None:
    os.truncate(home / "muster.db", 8192)


def damage_pages(home: Path) -> None:
    """All but the first: some of them the WAL does not have."""
    with open(home / "muster.db", "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


# Its latest writes -------------------------------------------------------------------------------


def no_wal(home: Path) -> None:
    (home / "muster.db-wal").unlink()


def cut_wal(home: Path) -> None:
    os.truncate(home / "muster.db-wal", (home / "muster.db-wal").stat().st_size // 2)


def damage_wal(home: Path) -> None:
    path = home / "muster.db-wal"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


def damage_wal_header(home: Path) -> None:
    path = home / "muster.db-wal"
    path.write_bytes(b"\0" * 32 + path.read_bytes()[32:])
