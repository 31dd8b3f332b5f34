"""What SQLite's errors mean: which pass by themselves, which somebody has to mend, on every Python."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from leaselib.errors import StoreError
from leaselib.stores import _sqlite_errors as errors


def sqlite_error(message: str, code: int | None = None) -> sqlite3.OperationalError:
    """As the sqlite3 module raises it: from Python 3.11 on with a code, possibly an extended one."""
    error = sqlite3.OperationalError(message)
    if code is not None:
        error.sqlite_errorcode = code  # type: ignore[attr-defined,unused-ignore]
    return error


BUSY_RECOVERY, BUSY_SNAPSHOT, IOERR_FSYNC, READONLY_DBMOVED, CORRUPT_INDEX = 261, 517, 1034, 1032, 779
MESSAGES = [
    ("database is locked", [5, BUSY_RECOVERY, BUSY_SNAPSHOT], True, "find the program"),
    ("database table is locked: leaselib_runs", [6], True, "find the program"),
    ("locking protocol", [15], True, "find the program"),
    ("disk I/O error", [10, IOERR_FSYNC], True, "tried again"),
    ("database or disk is full", [13], True, "Free some space"),
    ("database disk image is malformed", [11, CORRUPT_INDEX], False, "restore it from a backup"),
    ("malformed database schema (x)", [11], False, "restore it from a backup"),
    ("file is not a database", [26], False, "left as it is"),
    ("no such table: leaselib_runs", [1], True, "made anew"),
    ("no such column: epoch", [1], False, "changed the tables"),
]
TABLE = [(message, code, transient, hint) for message, codes, transient, hint in MESSAGES for code in [None, *codes]]


@pytest.mark.parametrize(("message", "code", "transient", "hint"), TABLE)
def test_an_error_means_the_same_by_its_code_and_by_its_message(
    tmp_path: Path, message: str, code: int | None, transient: bool, hint: str
) -> None:
    """Python 3.10 has the message only."""
    found = errors.store_error(sqlite_error(message, code), str(tmp_path / "x.db"), 2.5)
    assert found.transient is transient
    assert found.job is None
    assert hint in str(found)
    assert message in str(found)
    assert str(tmp_path / "x.db") in str(found)


SILENT = [(7, True), (9, True), (17, True), (3, False), (23, False), (21, False)]


@pytest.mark.parametrize(("code", "transient"), SILENT)
def test_codes_without_a_row_in_the_table_of_messages(tmp_path: Path, code: int, transient: bool) -> None:
    """Out of memory, interrupted and a schema that changes pass; a refused permission or misuse doesn't."""
    assert errors.store_error(sqlite_error("some words", code), str(tmp_path / "x.db"), 1).transient is transient


def test_a_real_locked_database_is_busy_and_keeps_its_connection(tmp_path: Path) -> None:
    first, second = (sqlite3.connect(tmp_path / "x.db", timeout=0, isolation_level=None) for _ in range(2))
    first.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as caught:
        second.execute("BEGIN IMMEDIATE")
    assert errors.is_busy(caught.value)
    assert errors.is_busy(sqlite_error(str(caught.value)))
    assert errors.keeps_connection(caught.value)
    first.close()
    second.close()


@pytest.mark.parametrize(("message", "kept"), [("database or disk is full", True), ("disk I/O error", False)])
def test_a_full_disk_keeps_the_connection_and_an_io_error_does_not(message: str, kept: bool) -> None:
    error = sqlite_error(message)
    assert not errors.is_busy(error)
    assert errors.keeps_connection(error) is kept


@pytest.mark.parametrize("message", ["unable to open database file", "attempt to write a readonly database"])
def test_a_file_that_can_not_be_opened_is_transient_if_nothing_is_wrong_with_its_path(
    tmp_path: Path, message: str
) -> None:
    (tmp_path / "x.db").write_text("")
    assert errors.store_error(sqlite_error(message), str(tmp_path / "x.db"), 1).transient
    folder = errors.store_error(sqlite_error(message), str(tmp_path), 1)
    assert not folder.transient
    assert "it is a folder" in str(folder)


def test_moved_away_is_transient(tmp_path: Path) -> None:
    assert errors.store_error(
        sqlite_error("attempt to write a readonly database", READONLY_DBMOVED), str(tmp_path / "x.db"), 1
    ).transient


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.ENOMEM])
def test_what_the_system_lacks_for_now_is_transient(tmp_path: Path, number: int) -> None:
    error = errors.os_store_error(OSError(number, os.strerror(number)), str(tmp_path / "x.db"))
    assert error.transient
    assert os.strerror(number) in str(error)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ELOOP])
def test_what_is_wrong_with_the_path_is_not_transient(tmp_path: Path, number: int) -> None:
    error = errors.os_store_error(OSError(number, os.strerror(number)), str(tmp_path / "x.db"))
    assert not error.transient
    assert "path" in str(error)


def test_a_path_that_is_too_long_is_told() -> None:
    assert "File name too long" in str(errors.path_fault("/tmp/" + "x" * 300 + "/y.db"))


@pytest.mark.parametrize("error", [ValueError("x"), StoreError("database is locked")])
def test_errors_of_others_are_not_busy(error: Exception) -> None:
    assert not errors.is_busy(error)
