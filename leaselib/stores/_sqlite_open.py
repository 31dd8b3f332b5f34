"""How SQLiteStore opens its file: what it refuses, what it creates, and how it knows the file again later.

Owns one lock, around the creation of files; called by whichever thread needs a connection. Nothing here opens the
database, its -wal or its -shm other than through SQLite: closing any descriptor of theirs drops the locks that SQLite
holds on them in this process. The one exception is the moment before a file exists.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leaselib import _clock, _random
from leaselib.errors import StoreError
from leaselib.stores._assets import load
from leaselib.stores._sqlite_errors import os_store_error

SCHEMA_VERSION = 1
OLDEST_SQLITE = (3, 24, 0)
MOUNTS = Path("/proc/self/mountinfo")
SYNCHRONOUS = {
    "NORMAL": "PRAGMA synchronous = NORMAL",
    "FULL": "PRAGMA synchronous = FULL",
    "EXTRA": "PRAGMA synchronous = EXTRA",
}
_SETTINGS = (
    "PRAGMA trusted_schema = OFF",  # views and triggers that a stranger put into the file call no functions
    "PRAGMA journal_size_limit = 16777216",  # a -wal that a long reader made grow shrinks again
)
# File systems shared between machines, or between a virtual machine and its host: there SQLite's locks, or the shared
# memory of its WAL mode, don't reach the other side.
_NETWORK = re.compile(
    "9p|afpfs|afs|beegfs|ceph|cephfs|cifs|coda|gfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs|nfs4|ocfs2|orangefs|prl_fs|"
    "pvfs2|smb2|smb3|smbfs|vboxsf|virtiofs|vmhgfs|"
    r"fuse\.(.*nfs.*|sshfs|.*s3.*|rclone|gcsfuse|ceph.*|glusterfs|smb.*|cifs.*|davfs.*|curlftpfs|grpcfuse|osxfs|"
    r"vmhgfs-fuse|juicefs|blobfuse2?|.*lustre.*|moosefs|mfs|seaweedfs)"
)
_EPOCH = re.compile(r"-?[0-9]{1,15}-[0-9A-Za-z]{1,64}")
_creation = threading.Lock()

FileId = tuple[int, int]
"""Device and inode: which file it is, whatever it is called."""


class FileReplaced(StoreError):
    """The database was deleted or replaced while it was open; the next try opens what is at the path now."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"SQLite store {path!r}: the file was deleted or replaced while it was in use. What is there now is opened",
            transient=True,
        )


@dataclass(eq=False)
class Connection:
    """An open connection; one thread at a time uses it.

    Attributes:
        raw: the connection itself.
        file: which file it has open.
        sides: which files its -wal and -shm are, by their paths.
        meta: the row of leaselib_meta that was found good.
        generation: the pool's generation when it was opened; only connections of the current one are used again.
    """

    raw: sqlite3.Connection
    file: FileId
    sides: dict[str, FileId]
    meta: tuple[object, ...]
    generation: int = 0


@functools.cache
def sql(name: str) -> str:
    """A statement of the folder sql/sqlite."""
    return load("sql/sqlite", f"{name}.sql")


def file_id(path: str) -> FileId | None:
    """Device and inode of what is at the path; None if nothing is there.

    Raises:
        StoreError: the path can't be looked at.
    """
    try:
        found = os.stat(path)  # noqa: PTH116  before every operation, and Path costs five times as much
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_store_error(error, path) from error
    return found.st_dev, found.st_ino


def check_meta(row: tuple[object, ...] | None, path: str) -> tuple[object, ...]:
    """The row of get_meta.sql itself, if it is good.

    Raises:
        StoreError: the tables are those of another version, or not this library's.
    """
    if row is None:
        raise StoreError(
            f"SQLite store {path!r}: its row of leaselib_meta was deleted; it is made anew, as a reset store",
            transient=True,
        )
    version, epoch = row
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"SQLite store {path!r}: its tables have version {version!r:.40}, this leaselib knows {SCHEMA_VERSION}. "
            f"Upgrade leaselib here, or give another file"
        )
    if type(epoch) is not str or not _EPOCH.fullmatch(epoch):
        raise StoreError(
            f"SQLite store {path!r}: the epoch in leaselib_meta is {epoch!r:.60}, expected milliseconds, '-' and "
            f"letters or digits. Restore the row, or delete it: then the store counts as reset"
        )
    return row


def connect(path: str, synchronous: str, clock: _clock.Clock, allow_network_fs: bool) -> Connection:
    """Opens the file, creating it and the tables if they are missing.

    Raises:
        StoreError: it can't be used as it is; the message says why.
        sqlite3.Error: SQLite could not do it.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreError(
            f"this Python has SQLite {sqlite3.sqlite_version}, SQLiteStore needs {'.'.join(map(str, OLDEST_SQLITE))} "
            f"or later. Use a Python that brings a later one"
        )
    real = os.path.realpath(path)
    if not allow_network_fs:
        _refuse_network(real)
    _create(real)
    before = file_id(path)
    raw = sqlite3.connect(real, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        meta = _prepare(raw, path, synchronous, clock)
        after = file_id(path)
        if after is None or after != before:
            raise FileReplaced(path)
        sides = {side: found for side in (f"{real}-wal", f"{real}-shm") if (found := file_id(side)) is not None}
    except BaseException:
        raw.close()
        raise
    return Connection(raw, after, sides, meta)


def clear_stale(connection: Connection) -> None:
    """Makes room for the file that has taken the place of the one that this connection has open.

    SQLite finds -wal and -shm by name: it would take those of the old file for the new one's and mix the two. They
    are removed if they are still the old file's own, under the old file's write lock, since other processes that had
    it open do the same.

    Raises:
        sqlite3.Error: the lock could not be had.
    """
    with contextlib.suppress(sqlite3.Error):
        # If the old file was only moved, this gives it what so far is only in -wal. If it was deleted, nobody cares.
        connection.raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    connection.raw.execute("BEGIN IMMEDIATE")
    try:
        for side, id_before in connection.sides.items():
            if file_id(side) == id_before:
                os.unlink(side)  # noqa: PTH108
    except OSError as error:
        raise os_store_error(error, side) from error
    finally:
        connection.raw.execute("ROLLBACK")


def _create(path: str) -> None:
    """Creates the file, empty, for this user alone, if there is none; SQLite gives -wal and -shm the same mode.

    The lock: another thread must not have it open through SQLite before it is closed here.
    """
    with _creation:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            return
        except OSError as error:
            raise os_store_error(error, path) from error


def _prepare(raw: sqlite3.Connection, path: str, synchronous: str, clock: _clock.Clock) -> tuple[object, ...]:
    # Takes effect in a new file only. A claim writes three pages, small rows all of them: half the size, half the work.
    raw.execute("PRAGMA page_size = 2048")
    (mode,) = raw.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"SQLite store {path!r}: its journal mode is {mode!r} and can't be made 'wal' there. Give a path on a file "
            f"system of this machine that has shared memory"
        )
    raw.execute(SYNCHRONOUS[synchronous])
    for setting in _SETTINGS:
        raw.execute(setting)
    try:
        row = raw.execute(sql("get_meta")).fetchone()
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such table"):
            raise
        row = None
    if row is None:
        _create_tables(raw, clock)
        row = raw.execute(sql("get_meta")).fetchone()
    return check_meta(row, path)


def _create_tables(raw: sqlite3.Connection, clock: _clock.Clock) -> None:
    raw.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(sql("schema")):
            raw.execute(statement)
        raw.execute(sql("add_meta"), (SCHEMA_VERSION, f"{clock.wall_ms()}-{_random.SYSTEM.token()}"))
        raw.execute("COMMIT")
    except BaseException:
        if raw.in_transaction:
            raw.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _refuse_network(path: str) -> None:
    kind = _file_system(path)
    if _NETWORK.fullmatch(kind):
        raise StoreError(
            f"SQLite store {path!r}: it is on a file system of type {kind}, shared with other machines, where SQLite's "
            f"locks don't hold. Give a path on a local disk, or use Redis or PostgreSQL. If all that use it are on one "
            f"machine and its locks do hold, allow_network_fs=True opens it all the same"
        )


def _file_system(path: str) -> str:
    """The type of the file system that the path is on; '' where the system doesn't tell."""
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:  # not Linux, or no /proc
        return ""
    found, kind = "", ""
    for line in lines:
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), before.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found):  # of two mounts on one point the later one is seen
            found, kind = point, after.split()[0]
    return kind
