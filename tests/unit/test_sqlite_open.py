"""What SQLiteStore refuses, what it creates, and what it says when its file is not what it should be."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _sqlite_open
from leaselib.stores._sqlite import SQLiteStore

SLOT = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a database may be."""
    return tmp_path / "leases.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    """A store at that path."""
    store = SQLiteStore(path)
    yield store
    store.close()


def edit(path: Path, *statements: str) -> None:
    """Changes the file behind the store's back."""
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def refusal(store: SQLiteStore) -> StoreError:
    """The error of an operation, and the same again: nothing is repaired by asking."""
    with pytest.raises(StoreError) as first:
        store.ping()
    with pytest.raises(StoreError) as second:
        store.claim("job", SLOT, "token", "runner", max_late=10**9)
    assert str(first.value) == str(second.value)
    store.close()
    return first.value


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (":memory:", "MemoryStore"),
        ("", "MemoryStore"),
        ("a\0b", "path of a file"),
        ("file:leases.db", "plain path"),
        ("FILE:/leases.db?mode=ro", "plain path"),
        (b"leases.db", "str or a pathlib.Path"),
    ],
)
def test_what_is_no_plain_path_is_refused_by_the_constructor(given: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        SQLiteStore(given)


@pytest.mark.parametrize("level", ["OFF", "full", "FULL; DROP TABLE x", ""])
def test_an_unsafe_or_unknown_synchronous_is_refused(path: Path, level: str) -> None:
    with pytest.raises(ConfigurationError, match="NORMAL, FULL, EXTRA"):
        SQLiteStore(path, synchronous=level)


@pytest.mark.parametrize(("level", "number"), [("NORMAL", 1), ("FULL", 2), ("EXTRA", 3)])
def test_each_connection_has_the_synchronous_that_was_asked_for(path: Path, level: str, number: int) -> None:
    store = SQLiteStore(path, synchronous=level)
    with store._transaction(5, write=True) as table:
        assert table._raw.execute("PRAGMA synchronous").fetchone() == (number,)
        assert table._raw.execute("PRAGMA trusted_schema").fetchone() == (0,)
        assert table._raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_making_a_store_touches_nothing(tmp_path: Path) -> None:
    """A scheduler's start never waits for the store."""
    store = SQLiteStore(tmp_path / "missing" / "leases.db")
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_repr_shows_path_and_namespace(path: Path) -> None:
    assert repr(SQLiteStore(path, "n")) == f"SQLiteStore({str(path)!r}, namespace='n')"


def test_a_relative_path_stays_where_it_was_when_the_process_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore("leases.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.ping()
    store.close()
    assert (tmp_path / "leases.db").exists()


@pytest.mark.skipif(os.name == "nt", reason="modes mean nothing there")
def test_the_file_and_its_side_files_are_for_this_user_alone(path: Path, store: SQLiteStore) -> None:
    old = os.umask(0)
    try:
        store.claim("job", SLOT, "token", "runner", max_late=10**9)
        assert {name.name: oct(name.stat().st_mode & 0o777) for name in path.parent.iterdir()} == {
            "leases.db": "0o600",
            "leases.db-wal": "0o600",
            "leases.db-shm": "0o600",
        }
    finally:
        os.umask(old)


def test_closing_leaves_one_file_and_the_next_operation_opens_it_again(path: Path, store: SQLiteStore) -> None:
    epoch = store.ping().epoch
    store.close()
    store.close()
    assert [found.name for found in path.parent.iterdir()] == ["leases.db"]
    assert store.ping().epoch == epoch


def test_an_application_may_keep_its_own_tables_in_the_file(path: Path, store: SQLiteStore) -> None:
    """Also those that it made before; its mode, page size and user version stay."""
    edit(path, "PRAGMA page_size = 8192", "PRAGMA user_version = 7", "CREATE TABLE jobs (x)")
    edit(path, "INSERT INTO jobs VALUES (5)")
    path.chmod(0o640)
    store.claim("job", SLOT, "token", "runner", max_late=10**9)
    store.close()
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert sorted(names) == ["jobs", "leaselib_jobs", "leaselib_meta", "leaselib_runs"]
    assert connection.execute("SELECT x FROM jobs").fetchall() == [(5,)]
    assert connection.execute("PRAGMA user_version").fetchone() == (7,)
    assert connection.execute("PRAGMA page_size").fetchone() == (8192,)
    connection.close()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_is_followed_when_the_file_is_made(tmp_path: Path) -> None:
    target = tmp_path / "target.db"
    (tmp_path / "link.db").symlink_to(target)
    store = SQLiteStore(tmp_path / "link.db")
    store.ping()
    assert target.stat().st_mode & 0o777 == 0o600
    store.close()


def test_a_folder_as_path_is_refused(tmp_path: Path) -> None:
    error = refusal(SQLiteStore(tmp_path))
    assert not error.transient
    assert "it is a folder; give the path of a file" in str(error)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = refusal(SQLiteStore(tmp_path / "missing" / "leases.db"))
    assert not error.transient
    assert str(tmp_path / "missing") in str(error)
    assert "create it" in str(error)


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(SQLiteStore(tmp_path / "file" / "leases.db"))
    assert not error.transient
    assert "not a folder" in str(error).lower() or "Not a directory" in str(error)


@pytest.mark.parametrize("content", [b"hello", b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    error = refusal(SQLiteStore(path))
    assert not error.transient
    assert "left as it is" in str(error)
    assert path.read_bytes() == content
    assert [found.name for found in path.parent.iterdir()] == ["leases.db"]


def test_a_damaged_database_is_refused(path: Path, store: SQLiteStore) -> None:
    for n in range(200):
        store.claim(f"job-{n}", SLOT, "token", "runner", max_late=10**9)
    store.close()
    raw = bytearray(path.read_bytes())
    raw[2048:-2048] = b"\xa5" * (len(raw) - 4096)
    path.write_bytes(raw)
    with pytest.raises(StoreError, match="integrity_check") as caught:
        store.runs("job-1")
    assert not caught.value.transient


def test_tables_of_a_newer_version_are_refused_at_once(path: Path, store: SQLiteStore) -> None:
    """Also by a connection that was open before the upgrade."""
    store.ping()
    edit(path, "UPDATE leaselib_meta SET schema_version = 2")
    error = refusal(store)
    assert not error.transient
    assert "version 2, this leaselib knows 1. Upgrade leaselib" in str(error)
    assert "version 2" in str(refusal(SQLiteStore(path)))


def test_tables_of_another_shape_are_refused(path: Path) -> None:
    edit(path, "CREATE TABLE leaselib_meta (x)")
    error = refusal(SQLiteStore(path))
    assert not error.transient
    assert "no such column" in str(error)


@pytest.mark.parametrize("epoch", ["''", "'abc'", "'1-'", "'x-1'", "'1-a b'", "x'312d61'", "'99999999999999999999-a'"])
def test_an_epoch_that_nobody_can_read_is_refused(path: Path, store: SQLiteStore, epoch: str) -> None:
    store.ping()
    edit(path, f"UPDATE leaselib_meta SET epoch = {epoch}")
    error = refusal(store)
    assert not error.transient
    assert "epoch" in str(error)


@pytest.mark.parametrize(
    "statements",
    [
        ["DELETE FROM leaselib_meta"],
        ["DROP TABLE leaselib_meta"],
        ["DROP TABLE leaselib_runs", "DROP TABLE leaselib_jobs", "DROP TABLE leaselib_meta"],
    ],
)
def test_tables_that_were_dropped_are_made_anew_with_a_new_epoch(
    path: Path, store: SQLiteStore, statements: list[str]
) -> None:
    epoch = store.ping().epoch
    edit(path, *statements)
    with pytest.raises(StoreError) as caught:
        store.ping()
    assert caught.value.transient
    assert store.ping().epoch != epoch


def test_a_dropped_table_of_runs_is_an_error_that_is_told(path: Path, store: SQLiteStore) -> None:
    store.claim("job", SLOT, "token", "runner", max_late=10**9)
    edit(path, "DROP TABLE leaselib_runs")
    with pytest.raises(StoreError, match="no such table: leaselib_runs"):
        store.get("job", SLOT)


def test_a_sqlite_that_is_too_old_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 22, 0))
    error = refusal(SQLiteStore(path))
    assert not error.transient
    assert "3.24.0 or later" in str(error)


def test_a_file_that_can_not_be_in_wal_mode_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without shared memory."""

    class NoWal(sqlite3.Connection):
        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            return super().execute("SELECT 'delete'" if "journal_mode" in statement else statement, *arguments)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=NoWal))
    error = refusal(SQLiteStore(path))
    assert not error.transient
    assert "'delete'" in str(error)


MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/root rw
22 21 0:40 / {folder} rw,relatime shared:1 master:2 - {kind} server:/export rw
23 22 0:41 / {folder}/local rw - tmpfs tmpfs rw
24 21 0:42 / {folder}x rw - nfs4 server:/other rw
broken line
"""


SHARED = ("nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "fuse.s3fs")
LOCAL = ("ext4", "overlay", "zfs", "tmpfs", "fuse.mergerfs")


@pytest.mark.parametrize(("kind", "refused"), [(kind, kind in SHARED) for kind in SHARED + LOCAL])
def test_a_file_system_shared_between_machines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    folder = tmp_path / "shared folder"
    (folder / "local").mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(folder=str(folder).replace(" ", "\\040"), kind=kind))
    monkeypatch.setattr(_sqlite_open, "MOUNTS", mounts)
    if refused:
        error = refusal(SQLiteStore(folder / "leases.db"))
        assert not error.transient
        assert f"type {kind}" in str(error)
        assert not (folder / "leases.db").exists()
    stores = [SQLiteStore(folder / "leases.db", allow_network_fs=True), SQLiteStore(folder / "local" / "leases.db")]
    if not refused:
        stores.append(SQLiteStore(folder / "leases.db"))
    for store in stores:
        store.ping()
        store.close()


def test_where_the_system_lists_no_mounts_the_file_is_opened(
    path: Path, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_open, "MOUNTS", path.parent / "missing")
    store.ping()


@pytest.mark.skipif(os.name == "nt", reason="no such limit there")
@pytest.mark.parametrize("exists", [False, True])
def test_without_free_descriptors_the_store_waits_for_better_times(
    path: Path, store: SQLiteStore, exists: bool
) -> None:
    import resource

    store.ping()
    store.close()
    if not exists:
        path.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreError) as caught:
            store.ping()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.transient
    store.ping()


def test_a_path_that_can_not_be_looked_at_is_an_error_that_is_told(
    path: Path, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.ping()

    def stat(_: object) -> os.stat_result:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(_sqlite_open.os, "stat", stat)
        with pytest.raises(StoreError, match="Input/output error") as caught:
            store.ping()
    assert caught.value.transient
    store.ping()
