"""SQLiteStore with real processes, threads, forks and faults: no claim is lost, and nobody is starved or stuck."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from leaselib.errors import StoreError
from leaselib.stores._sqlite import SQLiteStore

pytestmark = pytest.mark.system

SPAWN = multiprocessing.get_context("spawn")
ANY_TIME = 10**9
PATIENCE_S = 60.0


def slot(number: int) -> datetime:
    """A slot of these tests, long past, and the same in every process."""
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=number)


def claim(store: SQLiteStore, job: str, at: datetime, token: str, **options: Any) -> str:
    """A claim's outcome."""
    return store.claim(job, at, token, f"runner-{os.getpid()}", max_late=ANY_TIME, **options).outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database is."""
    return tmp_path / "leases.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    """This process's store."""
    store = SQLiteStore(path)
    yield store
    store.close()


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, Any]]:
    """A process of its own that runs `target(pipe, *arguments)`; yields our end of the pipe and the process."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()


def answer(pipe: Connection) -> Any:
    """What a child says next; fails rather than waits for ever."""
    assert pipe.poll(PATIENCE_S), "the child said nothing"
    return pipe.recv()


# ---- many writers ------------------------------------------------------------------------------------------------


def _claimer(pipe: Connection, path: str, number: int, seconds: float) -> None:
    """Races the others for the slots of one job, and writes to a job of its own between."""
    store = SQLiteStore(path)
    pipe.recv()
    epoch, won, waits, own = store.ping().epoch, [], [], 0
    end = time.monotonic() + seconds
    shared = 0
    while time.monotonic() < end:
        began = time.monotonic()
        if claim(store, "shared", slot(shared), f"{number}-{shared}", overlap="allow", timeout=20) == "won":
            won.append(shared)
            assert store.finish("shared", slot(shared), f"{number}-{shared}", "success", timeout=20)
        assert claim(store, f"own-{number}", slot(own), f"{number} {own}", timeout=20) == "won"
        assert store.finish(f"own-{number}", slot(own), f"{number} {own}", "success", timeout=20)
        waits.append(time.monotonic() - began)
        shared, own = shared + 1, own + 1
    pipe.send((epoch, won, waits, own))
    store.close()


def test_eight_processes_that_never_pause_lose_no_claim_and_none_of_them_starves(path: Path) -> None:
    """They also find no file at first, and make it all at once. Any error, such as 'locked', would end its process."""
    count, seconds = 8, 3.0
    pipes, children = [], []
    for number in range(count):
        ours, theirs = SPAWN.Pipe()
        children.append(SPAWN.Process(target=_claimer, args=(theirs, str(path), number, seconds)))
        children[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.send("go")
    answers = [answer(pipe) for pipe in pipes]
    for process in children:
        process.join()
        assert process.exitcode == 0

    assert len({epoch for epoch, *_ in answers}) == 1
    wins = [number for _, won, *_ in answers for number in won]
    assert len(wins) == len(set(wins)) > 0
    assert sorted(wins) == list(range(len(wins)))
    store = SQLiteStore(path)
    assert {(run.slot, run.status) for run in store.runs("shared", 10**6)} == {(slot(n), "success") for n in wins}
    owns = [own for *_, own in answers]
    for number, own in enumerate(owns):
        assert len(store.runs(f"own-{number}", 10**6)) == own
    store.close()
    assert min(owns) > sum(owns) / count / 5, f"shares: {sorted(owns)}"
    waits = sorted(wait for _, _, waits, _ in answers for wait in waits)  # of three or four operations each
    assert waits[int(len(waits) * 0.99)] < 4 * 0.5
    assert waits[-1] < 20


def test_threads_that_claim_without_pause_hold_up_no_heartbeat(store: SQLiteStore) -> None:
    assert claim(store, "long", slot(0), "token", lease=30) == "won"
    stop, faults = threading.Event(), list[BaseException]()

    def storm(number: int) -> None:
        try:
            for n in range(10**6):
                if stop.is_set():
                    return
                assert claim(store, f"job-{number}", slot(n), f"{number}-{n}", overlap="allow") == "won"
                assert store.finish(f"job-{number}", slot(n), f"{number}-{n}", "success")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    waits = []
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        began = time.monotonic()
        assert store.heartbeat("long", slot(0), "token", 30)
        waits.append(time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(waits) > 10
    assert max(waits) < 1.0


# ---- locks that others hold --------------------------------------------------------------------------------------


def _lock_holder(pipe: Connection, path: str, seconds: float) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    pipe.send("locked")
    time.sleep(seconds)
    connection.execute("ROLLBACK")
    connection.close()


def test_another_program_that_holds_the_lock_for_three_seconds_only_delays(store: SQLiteStore, path: Path) -> None:
    """Reads go on; a short time-out is kept; a claim that waited is judged by the time at which it got the lock."""
    store.ping()
    with child(_lock_holder, str(path), 3.0) as (pipe, _):
        assert answer(pipe) == "locked"
        locked = time.time()
        assert store.get("job", slot(0)) is None
        began = time.monotonic()
        with pytest.raises(StoreError, match="another program held its lock") as caught:
            claim(store, "job", slot(0), "token", timeout=0.3)
        assert caught.value.transient
        assert 0.2 < time.monotonic() - began < 1.5
        queued = threading.Thread(target=claim, args=(store, "job", slot(0), "first"))
        queued.start()
        with pytest.raises(StoreError) as caught:
            store.heartbeat("job", slot(0), "x", 30, timeout=0.3)
        assert caught.value.transient
        won = store.claim("other", slot(0), "token", "runner", max_late=ANY_TIME, timeout=20)
        queued.join()
    assert won.outcome == "won"
    assert won.now.timestamp() > locked + 2.5
    run = store.get("job", slot(0))
    assert run is not None
    assert run.token == "first"


def _stuck_writer(pipe: Connection, path: str) -> None:
    store = SQLiteStore(path)
    with store._transaction(5, write=True) as table:
        table.set_meta("job", table.meta("job"))
        pipe.send("inside")
        pipe.recv()


def test_a_writer_killed_in_the_middle_of_a_transaction_frees_the_lock_and_leaves_nothing(
    store: SQLiteStore, path: Path
) -> None:
    assert claim(store, "before", slot(0), "token") == "won"
    for _ in range(2):
        with child(_stuck_writer, str(path)) as (pipe, process):
            assert answer(pipe) == "inside"
            with pytest.raises(StoreError) as caught:
                claim(store, "job", slot(0), "token", timeout=0.1)
            assert caught.value.transient
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert store.jobs() == ["before"]
    assert claim(store, "job", slot(0), "token", timeout=1) == "won"
    assert store.heartbeat("before", slot(0), "token", 30)


def _claims_until_killed(pipe: Connection, path: str) -> None:
    store = SQLiteStore(path)
    for n in range(10**6):
        assert claim(store, "job", slot(n), f"{n}", overlap="allow") == "won"
        pipe.send(n)


def test_what_was_answered_survives_the_death_of_the_process(store: SQLiteStore, path: Path) -> None:
    with child(_claims_until_killed, str(path)) as (pipe, process):
        while answer(pipe) < 50:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = 50
        while pipe.poll():
            try:
                last = pipe.recv()
            except EOFError:
                break
    assert {run.slot for run in store.runs("job", 10**6)} >= {slot(n) for n in range(last + 1)}


# ---- fork --------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], str]) -> str:
    """What `work` returns, or the error that it raises, in a child of fork."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: a fork with threads alive
        pid = os.fork()
    if pid == 0:
        _report_and_exit(work, writing)
    os.close(writing)
    return _read_from(reading, pid)


def _report_and_exit(work: Callable[[], str], writing: int) -> None:
    try:
        signal.alarm(30)  # a child that hangs must end
        os.write(writing, work().encode())
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _read_from(reading: int, pid: int) -> str:
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def test_forks_under_load_harm_neither_parent_nor_child(store: SQLiteStore, path: Path) -> None:
    """Other threads write and read at full speed at the moment of each fork."""
    stop, faults, done = threading.Event(), list[BaseException](), [0] * 3

    def storm(number: int) -> None:
        try:
            while not stop.is_set():
                n = done[number]
                assert claim(store, f"job-{number}", slot(n), f"{n}", overlap="allow") == "won"
                assert store.get(f"job-{number}", slot(n)) is not None
                assert store.finish(f"job-{number}", slot(n), f"{n}", "success")
                done[number] += 1
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(40):
            assert forked(lambda n=n: claim(store, "child", slot(n), f"{n}", overlap="allow")) == "won"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert len(store.runs("child", 10**6)) == 40
    for number, count in enumerate(done):
        assert count > 0
        assert len(store.runs(f"job-{number}", 10**6)) == count
    check_integrity(path)


def _claim_and_leave(pipe: Connection, path: str) -> None:
    store = SQLiteStore(path)
    pipe.send(claim(store, "job", slot(50), "other", overlap="allow"))
    store.close()


def test_a_child_loses_nothing_when_its_parent_and_then_another_process_close_the_file(
    store: SQLiteStore, path: Path
) -> None:
    """Locks that a child only seems to hold would let the other process take the child's -wal away."""
    assert claim(store, "job", slot(0), "0", overlap="allow") == "won"
    go_reading, go_writing = os.pipe()
    ready_reading, ready_writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # also if this test fails
        outcomes = [claim(store, "job", slot(1), "1", overlap="allow")]
        os.write(ready_writing, b"x")
        os.read(go_reading, 1)
        outcomes += [claim(store, "job", slot(n), f"{n}", overlap="allow") for n in range(2, 10)]
        os._exit(0 if outcomes == ["won"] * 9 else 1)
    os.read(ready_reading, 1)
    store.close()
    with child(_claim_and_leave, str(path)) as (pipe, _):
        assert answer(pipe) == "won"
    os.write(go_writing, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (go_reading, go_writing, ready_reading, ready_writing):
        os.close(descriptor)
    assert {run.slot for run in store.runs("job")} == {slot(n) for n in [*range(10), 50]}


def fork_unannounced() -> int:
    """A fork of which Python's hooks learn nothing, as in uWSGI."""
    return int(ctypes.PyDLL(None).fork())


def test_a_child_of_an_unannounced_fork_opens_its_own_connection(store: SQLiteStore) -> None:
    assert claim(store, "job", slot(0), "0", overlap="allow") == "won"
    inherited = store._connections._idle[0]
    reading, writing = os.pipe()
    pid = fork_unannounced()
    if pid == 0:

        def work() -> str:
            outcome = claim(store, "job", slot(1), "1", overlap="allow")
            inherited.raw.total_changes  # noqa: B018  raises if it was closed
            return f"{outcome} {store._connections._idle[0] is inherited}"

        _report_and_exit(work, writing)
    os.close(writing)
    assert _read_from(reading, pid) == "won False"
    assert store._connections._idle[0] is inherited
    assert len(store.runs("job")) == 2


def test_a_child_of_an_unannounced_fork_within_a_transaction_says_that_it_must_be_restarted(store: SQLiteStore) -> None:
    """To SQLite the parent's lock would seem to be its own child's, for ever."""
    reading, writing = os.pipe()
    with store._transaction(5, write=True):
        pid = fork_unannounced()
        if pid == 0:
            _report_and_exit(lambda: claim(store, "job", slot(1), "1", timeout=2), writing)
    os.close(writing)
    assert "Restart this process" in _read_from(reading, pid)
    assert claim(store, "job", slot(1), "1") == "won"


# ---- the file is deleted, moved or replaced ----------------------------------------------------------------------


def _peer(pipe: Connection, path: str) -> None:
    """Claims what it is told to, and answers with outcome and epoch."""
    store = SQLiteStore(path)
    while True:
        try:
            job, at, token = pipe.recv()
        except EOFError:
            break
        found = store.claim(job, at, token, "peer", max_late=ANY_TIME)
        pipe.send((found.outcome, found.epoch))
    store.close()


def check_integrity(path: Path) -> None:
    """SQLite finds no fault with the file."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def delete_all(path: Path) -> None:
    for found in path.parent.glob("leases.db*"):
        found.unlink()


def delete_database_alone(path: Path) -> None:
    path.unlink()


def move_database_away(path: Path) -> None:
    path.rename(path.parent / "moved.db")


def put_another_in_its_place(path: Path) -> None:
    other = SQLiteStore(path.parent / "other.db")
    for n in range(300):
        claim(other, "theirs", slot(n), f"{n}", overlap="allow")
    other.close()
    os.replace(path.parent / "other.db", path)


@pytest.mark.parametrize("change", [delete_all, delete_database_alone, move_database_away, put_another_in_its_place])
def test_a_file_that_is_taken_away_under_two_processes_is_noticed_by_both(
    store: SQLiteStore, path: Path, change: Callable[[Path], None]
) -> None:
    """Both go on with what is there then, see each other there, and a new epoch tells them; nothing is mixed up."""
    with child(_peer, str(path)) as (pipe, _):
        for n in range(200):  # so that -wal holds many pages
            claim(store, "mine", slot(n), f"{n}", overlap="allow")
        pipe.send(("before", slot(0), "peer"))
        before, epoch = answer(pipe)
        assert (before, epoch) == ("won", store.ping().epoch)

        change(path)
        pong = store.ping()
        assert pong.epoch != epoch
        assert store.get("before", slot(0)) is None
        assert claim(store, "job", slot(1), "mine") == "won"
        pipe.send(("job", slot(1), "peer"))
        assert answer(pipe) == ("running", pong.epoch)
        pipe.send(("job2", slot(1), "peer"))
        assert answer(pipe) == ("won", pong.epoch)
        assert claim(store, "job2", slot(1), "mine") == "running"
        theirs = len(store.runs("theirs", 1000))
    store.close()
    check_integrity(path)
    assert theirs == (300 if change is put_another_in_its_place else 0)
    if change is move_database_away:
        moved = SQLiteStore(path.parent / "moved.db")
        assert len(moved.runs("mine", 1000)) == 200
        moved.close()


def test_a_claim_that_waits_while_the_file_is_replaced_is_made_in_the_new_one(store: SQLiteStore, path: Path) -> None:
    epoch = store.ping().epoch
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(store.claim("job", slot(0), "token", "runner", max_late=ANY_TIME))
    )
    waiting.start()
    while not store._connections.turn._held:
        time.sleep(0.001)
    put_another_in_its_place(path)
    blocker.execute("ROLLBACK")
    blocker.close()
    waiting.join()
    assert found[0].outcome == "won"
    assert found[0].epoch != epoch
    assert store.get("job", slot(0)) is not None


def test_a_folder_that_is_taken_away_is_told_and_its_return_ends_the_trouble(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    store = SQLiteStore(folder / "leases.db")
    epoch = store.ping().epoch
    folder.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(StoreError, match="does not exist; create it") as caught:
            store.ping()
        assert not caught.value.transient
    (tmp_path / "away").rename(folder)
    assert store.ping().epoch == epoch
    store.close()


# ---- no space, no rights -----------------------------------------------------------------------------------------


def fill_up(store: SQLiteStore) -> StoreError:
    """Claims until the store is full; returns the error."""
    for n in range(20_000):
        try:
            claim(store, "job", slot(n), f"{n:0>199}", overlap="allow")
        except StoreError as error:
            return error
    raise AssertionError("the store never filled up")


def test_a_full_database_is_transient_and_the_same_connection_goes_on_once_there_is_room(store: SQLiteStore) -> None:
    store.ping()
    (connection,) = store._connections._idle
    connection.raw.execute("PRAGMA max_page_count = 60")
    error = fill_up(store)
    assert error.transient
    assert "full" in str(error)
    assert store.heartbeat("job", slot(0), "0" * 199, 30)
    connection.raw.execute("PRAGMA max_page_count = 100000")
    assert claim(store, "job", slot(20_000), "token", overlap="allow") == "won"
    assert store._connections._idle == [connection]


TINY_DISK = """
import os, subprocess, sys
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", sys.argv[1]]).returncode:
    sys.exit(77)
sys.path[:0] = sys.path_extra
from pathlib import Path
import test_sqlite_store as tests
from leaselib.stores._sqlite import SQLiteStore
path = Path(sys.argv[1]) / "leases.db"
store = SQLiteStore(path)
error = tests.fill_up(store)
assert error.transient, error
assert "full" in str(error) or "I/O" in str(error), error
filler = Path(sys.argv[1]) / "filler"
for _ in range(3):
    again = tests.fill_up(store)
    assert again.transient, again
store.close()
store = SQLiteStore(path)
try:
    store.purge("job", force=True)
except tests.StoreError as error:
    assert error.transient, error
assert subprocess.run(["mount", "-o", "remount,size=4m", sys.argv[1]]).returncode == 0
assert tests.claim(store, "other", tests.slot(1), "token") == "won"
store.close()
tests.check_integrity(path)
print("went on after more room was given")
"""


def test_a_full_disk_is_transient_and_more_room_ends_the_trouble_without_a_restart(tmp_path: Path) -> None:
    """A real file system of 600 kB where one may be mounted; a limit on the size of files where not."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    script = TINY_DISK.replace("sys.path_extra", repr(paths))
    tmp_path.joinpath("disk").mkdir()
    try:
        done = subprocess.run(
            ["unshare", "-m", sys.executable, "-c", script, str(tmp_path / "disk")],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    except FileNotFoundError:
        done = None
    if done is None or (done.returncode in (1, 77) and "Traceback" not in done.stderr):
        assert forked(lambda: _limited_file_size(tmp_path)) == "went on"
    else:
        assert done.stdout.strip() == "went on after more room was given", done.stderr


def _limited_file_size(folder: Path) -> str:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    store = SQLiteStore(folder / "limited.db")
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    error = fill_up(store)
    assert error.transient, error
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert claim(store, "other", slot(1), "token") == "won"
    return "went on"


def test_a_limit_on_the_size_of_files_is_transient(tmp_path: Path) -> None:
    """An I/O error to SQLite; the connection is opened anew."""
    assert forked(lambda: _limited_file_size(tmp_path)) == "went on"


def _without_rights(pipe: Connection, folder: str) -> None:
    """As a user who may read and not write: root's rights are given up."""
    warm = SQLiteStore(Path(folder) / "warm.db")
    warm.ping()
    warm.close()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for name in ("readonly/leases.db", "locked/leases.db", "locked/new.db", "hidden/leases.db"):
        store = SQLiteStore(Path(folder) / name)
        try:
            pipe.send((name, claim(store, "job", slot(0), "token"), True))
        except StoreError as error:
            pipe.send((name, str(error), error.transient))
        store.close()


def test_missing_rights_are_told_with_what_to_do(tmp_path: Path) -> None:
    """A file that can't be written, a folder that can't be written, a folder that can't be entered."""
    folder = tmp_path
    for parent in (folder, *folder.parents):
        if parent.owner() == folder.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    for name in ("readonly", "locked", "hidden"):
        (folder / name).mkdir()
        made = SQLiteStore(folder / name / "leases.db")
        made.ping()
        made.close()
        (folder / name / "leases.db").chmod(0o444 if name == "readonly" else 0o666)
    (folder / "readonly").chmod(0o777)
    (folder / "locked").chmod(0o555)
    (folder / "hidden").chmod(0)
    try:
        with child(_without_rights, str(folder)) as (pipe, _):
            said = {name: (text, transient) for name, text, transient in (answer(pipe) for _ in range(4))}
    finally:
        for name in ("readonly", "locked", "hidden"):
            (folder / name).chmod(0o755)
    assert {name: transient for name, (_, transient) in said.items()} == dict.fromkeys(said, False), said
    assert "can't read and write the file" in said["readonly/leases.db"][0]
    assert "can't create files in" in said["locked/leases.db"][0]
    assert "can't create files in" in said["locked/new.db"][0]
    assert "ermission denied" in said["hidden/leases.db"][0]


# ---- growth ------------------------------------------------------------------------------------------------------


def test_history_and_file_stop_growing(path: Path) -> None:
    """And no connection stays behind."""
    from fix_stores import ManualClock

    clock = ManualClock()
    store = SQLiteStore(path, synchronous="NORMAL", clock=clock)
    sizes = []
    for n in range(2_000):
        at = clock.now()
        won = store.claim("job", at, f"{n}", "runner", history_size=10, max_late=0)
        assert won.outcome == "won"
        assert store.finish("job", at, f"{n}", "success", "x" * 200)
        clock.advance(10)
        if n % 500 == 499:
            store.close()
            sizes.append(path.stat().st_size)
    assert len(store.runs("job", 10**6)) <= 20
    assert sizes[-1] == sizes[1]
    assert len(store._connections._idle) == 1
    store.close()
