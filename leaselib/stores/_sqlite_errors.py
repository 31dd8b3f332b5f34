"""What SQLite's and the system's errors mean to SQLiteStore: try again, or tell somebody what to mend.

Owns nothing; any thread may call it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from leaselib.errors import StoreError

BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, NOTADB = 5, 6, 8, 10, 11, 13, 14, 15, 26
"""SQLite's primary result codes, for Pythons whose sqlite3 module doesn't name them."""
# Python 3.10 keeps the code to itself, so there the text of the message, which SQLite never translates, must do.
_CODES = {
    "database is locked": BUSY,
    "database table is locked": LOCKED,
    "attempt to write a readonly database": READONLY,
    "disk I/O error": IOERR,
    "database disk image is malformed": CORRUPT,
    "malformed database schema": CORRUPT,
    "database or disk is full": FULL,
    "unable to open database file": CANTOPEN,
    "locking protocol": PROTOCOL,
    "file is not a database": NOTADB,
    "file is encrypted or is not a database": NOTADB,
}
_WAITING = frozenset((BUSY, LOCKED, PROTOCOL))
# Memory, interrupts and a schema that somebody is changing (7, 9, 17) pass by themselves too.
_TRANSIENT = frozenset((*_WAITING, IOERR, FULL, 7, 9, 17))
_KEPT = frozenset((*_WAITING, FULL))
# What somebody has to mend before the path can be opened; anything else (descriptors, memory, disk) may pass.
_PATH_FAULTS = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
)


def code_of(error: sqlite3.Error) -> int:
    """SQLite's primary result code of an error; 0 if it can't be told."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return int(code) & 0xFF
    text = str(error)
    return next((code for start, code in _CODES.items() if text.startswith(start)), 0)


def is_busy(error: BaseException) -> bool:
    """Whether somebody else holds a lock: another try may succeed at once."""
    return isinstance(error, sqlite3.Error) and code_of(error) in _WAITING


def keeps_connection(error: BaseException) -> bool:
    """Whether a connection is as good as before once its transaction is rolled back.

    A full disk must not cost the connection: it can still update in place, but might not be opened again.
    """
    return not isinstance(error, sqlite3.Error) or code_of(error) in _KEPT


def is_undecodable(error: sqlite3.Error) -> bool:
    """Whether a stored text is not UTF-8, which the sqlite3 module reports as if the operation had failed."""
    return str(error).startswith("Could not decode to UTF-8")


def store_error(error: sqlite3.Error, path: str, timeout: float) -> StoreError:
    """The StoreError for what SQLite said."""
    code, where = code_of(error), f"SQLite store {path!r}"
    if code in _WAITING:
        return StoreError(
            f"{where}: another program held its lock for all of {timeout:g} s ({error}). It is asked again; if that "
            f"goes on, find the program that keeps a transaction open",
            transient=True,
        )
    if code == FULL:
        return StoreError(f"{where}: {error}. Free some space on its file system", transient=True)
    if code in (CANTOPEN, READONLY):
        fault = path_fault(path)
        if fault is None:  # descriptors used up, or the file was moved away this very moment
            return StoreError(f"{where}: {error}. It is tried again", transient=True)
        return StoreError(f"{where}: {error}: {fault}")
    if code == NOTADB:
        return StoreError(
            f"{where}: {error}. The file is left as it is: give the path of another file, or restore this one"
        )
    if code == CORRUPT:
        return StoreError(
            f"{where}: {error}. The file is left as it is: stop every program that uses it, look with PRAGMA "
            f"integrity_check, restore it from a backup, or move it and its -wal and -shm away together"
        )
    if code in _TRANSIENT:
        return StoreError(f"{where}: {error}. It is tried again", transient=True)
    if str(error).startswith("no such table: leaselib_"):
        return StoreError(f"{where}: {error}. Its tables were dropped; they are made anew", transient=True)
    return StoreError(
        f"{where}: {error}. This is not how this version of leaselib left it: has another program changed the "
        f"tables leaselib_*? Restore them, or give another file"
    )


def os_store_error(error: OSError, path: str) -> StoreError:
    """The StoreError for what the system said about the path."""
    if error.errno in _PATH_FAULTS:
        fault = path_fault(path) or "look at the path and its permissions"
        return StoreError(f"SQLite store {path!r}: {error.strerror}: {fault}")
    return StoreError(f"SQLite store {path!r}: {error}. It is tried again", transient=True)


def path_fault(path: str) -> str | None:
    """What somebody has to mend before this path can be a database, or None if nothing is seen."""
    file, folder = Path(path), Path(path).parent
    try:
        if file.is_dir():
            return "it is a folder; give the path of a file, such as " + repr(str(file / "leases.db"))
        if not folder.exists():
            return f"the folder {str(folder)!r} does not exist; create it"
    except OSError as error:
        return f"{error.strerror}; give a path that this user can reach"
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder; give a path in one"
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        return "this user can't read and write the file; change its owner or mode, or mount its file system writable"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"this user can't create files in {str(folder)!r}, where SQLite needs a -wal and a -shm file; allow it"
    return None
