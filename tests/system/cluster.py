"""Clusters of real processes: spawn instances, kill, freeze and end them, and wait for the facts that they journal.

Used by the test's thread only. What instances do stands in `instance_program`. A test waits for facts, with a bound;
it never sleeps for them. All times are seconds of CLOCK_MONOTONIC, which the processes of a machine share; slots and
other instants of a store's are milliseconds since the epoch.

To put a store under these tests, add one line to CLUSTER_STORES: the name that `--stores` knows it by, and a context
manager that takes an empty folder and gives the URL of a place (file, server and namespace) that nobody else uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import history
from history import audit, processes

import leaselib
from leaselib._model import from_ms, to_ms
from leaselib._options import JobOptions, JobOptionsDict, job_options
from leaselib.events import EVENT_NAMES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

LEASE_S = 1.0
BEAT_S = 0.15
SLACK_S = 0.75 * float(os.environ.get("LEASELIB_TEST_SLACK", "1"))
"""Tolerance of every upper time bound: two cores, other load, and the time that a store's operations take."""
TAKEOVER_S = LEASE_S + 2 * BEAT_S
"""The rules' bound on a takeover, from the last heartbeat."""
OPTIONS: dict[str, Any] = {"lease": LEASE_S, "heartbeat": BEAT_S, "jitter": 0.05, "stop_timeout": 4}
OWN_FAULTS = ("internal error", "Fatal Python error", "Exception in thread", "Exception ignored", "Logging error")
"""What no instance may ever write to its stderr, whatever a test does to it."""

KEEP = 100_000
"""So many of a job's runs are judged, the newest."""

Fact = dict[str, Any]


# ---- stores ---------------------------------------------------------------------------------------------------------


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    """A file in the folder."""
    yield f"sqlite:///{folder / 'leases.db'}"


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A namespace of its own on the session's Redis."""
    import fix_servers_redis

    yield _named(fix_servers_redis.session_url(), folder)


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A namespace of its own on the session's PostgreSQL."""
    import fix_servers_postgres

    yield _named(fix_servers_postgres.session_url(), folder)


def _named(url: str, folder: Path) -> str:
    """The URL with a namespace that no other test uses."""
    return f"{url}{'&' if '?' in url else '?'}namespace=cluster-{folder.parent.name}-{secrets.token_hex(4)}"


CLUSTER_STORES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "sqlite": sqlite,
    "redis": redis,
    "postgres": postgres,
}
DEFAULT_STORES = ("sqlite",)
"""What these tests run on unless `--stores` says otherwise."""


def audited(url: str, *, own_server: bool = False) -> audit.Audit | None:
    """Begins to audit a store, if it is a file or a server of one's own, and of a kind that can be audited."""
    if not (own_server or url.startswith("sqlite")):
        return None
    with contextlib.closing(leaselib.open_store(url)) as store:
        store.ping()  # makes the tables, if it is a file
    return audit.attach(url)


# ---- waiting --------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str, within_s: float = 10) -> Any:
    """Waits until the condition is true; returns what it returned."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s:.2f} s: {what}"
        time.sleep(0.01)
    return found


# ---- slots ----------------------------------------------------------------------------------------------------------


def wall_ms() -> int:
    """This machine's time of day."""
    return time.time_ns() // 1_000_000


def every_ms_due(at_ms: int, *, shortest_ms: int = 600_000) -> int:
    """An interval with a slot at `at_ms`, or up to 20 ms before, and no other within `shortest_ms` of that one."""
    interval_ms = shortest_ms
    while at_ms % interval_ms > 20:
        interval_ms += 1
    return interval_ms


def due_in(seconds: float) -> int:
    """An interval in ms, with one slot so many seconds from now and no other within ten minutes."""
    return every_ms_due(wall_ms() + round(seconds * 1000))


def slots_between(every_ms: int, first_ms: int, last_ms: int) -> list[int]:
    """The slots of an interval in [first_ms, last_ms]."""
    return list(range(-(-first_ms // every_ms) * every_ms, last_ms + 1, every_ms))


# ---- facts ----------------------------------------------------------------------------------------------------------


def fits(fact: Mapping[str, Any], match: Mapping[str, Any]) -> bool:
    """Whether a fact's fields are as wanted: each a value, a set of values, or a predicate."""
    for name, wanted in match.items():
        found = fact.get(name)
        if callable(wanted):
            if found is None or not wanted(found):
                return False
        elif found not in wanted if isinstance(wanted, (set, frozenset)) else found != wanted:
            return False
    return True


class Journal:
    """The facts of all processes of a cluster, in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._file = path.open("rb")
        self._partial = b""
        self._facts: list[Fact] = []

    def facts(self, fact: str | None = None, **match: Any) -> list[Fact]:
        """All facts so far of that kind, with such fields."""
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        self._facts += [json.loads(line) for line in lines]
        return [f for f in self._facts if (fact is None or f["fact"] == fact) and fits(f, match)]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


# ---- processes ------------------------------------------------------------------------------------------------------


class Instance:
    """A child process. `conf` is what it was told; `stderr` is where it complains."""

    def __init__(self, cluster: Cluster, popen: subprocess.Popen[bytes], conf: Mapping[str, Any], stderr: Path) -> None:
        self._cluster, self.popen, self.conf, self.stderr = cluster, popen, conf, stderr
        self.pid = popen.pid
        self._numbers = 0

    def alive(self) -> bool:
        """Whether it runs."""
        return self.popen.poll() is None

    def kill(self) -> float:
        """SIGKILL; returns when."""
        at = time.monotonic()
        self._cluster.killed.add(self.pid)
        self.popen.kill()
        self.popen.wait()
        return at

    def freeze(self) -> float:
        """SIGSTOP, until every thread of it stands still; returns when.

        Never in the middle of a SQLite transaction, which would freeze the store for everybody.
        """
        while True:
            self.popen.send_signal(signal.SIGSTOP)
            self._cluster.until(lambda: state_of(self.pid) == "T", "it is stopped")
            if self._cluster.store_is_free():
                return time.monotonic()
            self.thaw()

    def thaw(self) -> float:
        """SIGCONT; returns when."""
        at = time.monotonic()
        self.popen.send_signal(signal.SIGCONT)
        return at

    def terminate(self) -> float:
        """SIGTERM; returns when."""
        at = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        return at

    def ended(self, within_s: float, status: int = 0) -> float:
        """Waits until it has ended by itself; returns when."""
        try:
            found = self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"process {self.pid} still runs after {within_s:.2f} s; {self._cluster.complaints()}"
            ) from None
        assert found == status, f"process {self.pid} ended with {found}; {self._cluster.complaints()}"
        return time.monotonic()

    def tell(self, do: str, **fields: Any) -> Any:
        """Gives a command and returns the answer."""
        return self.answer(self.send(do, **fields))

    def send(self, do: str, **fields: Any) -> int:
        """Gives a command; returns its number."""
        if do == "add":
            self._cluster.know([fields["job"]], self.conf["options"])
        self._numbers += 1
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"number": self._numbers, "do": do, **fields}).encode() + b"\n")
        self.popen.stdin.flush()
        return self._numbers

    def answer(self, number: int, within_s: float = 10) -> Any:
        """The answer to a command."""
        return self._cluster.wait("answer", within_s, pid=self.pid, number=number)["answer"]


class Cluster:
    """Instances that share a store, and their journal.

    own_server: whether nobody else uses the store's server, so that it may be audited.
    killed: the processes that somebody killed; they owe no last words.
    """

    def __init__(self, url: str, folder: Path, *, own_server: bool = False) -> None:
        self.url, self.folder = url, folder
        self.journal = Journal(folder / "journal")
        self.instances: list[Instance] = []
        self.killed: set[int] = set()
        self._options: dict[str, list[JobOptions]] = {}
        self._excused: set[str] = set()
        self.store = leaselib.open_store(url)
        create_schema = getattr(self.store, "create_schema", None)
        if create_schema is not None:
            create_schema()
        self._audit = audited(url, own_server=own_server)
        self._wall_minus_monotonic_ms = wall_ms() - time.monotonic() * 1000

    @property
    def file(self) -> str | None:
        """The path of the store's file, if it is one."""
        return self.url.partition(":///")[2] if self.url.startswith("sqlite") else None

    def store_is_free(self) -> bool:
        """Whether nobody stopped inside a transaction."""
        if self.file is None:
            return True  # a server ends what it was sent, whatever becomes of the sender
        try:
            with contextlib.closing(sqlite3.connect(self.file, timeout=0.1, isolation_level=None)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        return True

    def at(self, slot_ms: int) -> float:
        """When a slot is due, on the monotonic clock."""
        return (slot_ms - self._wall_minus_monotonic_ms) / 1000

    # ---- processes --------------------------------------------------------------------------------------------------

    def environment(self, conf: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
        """The environment of a child."""
        path = os.pathsep.join(p for p in (str(ROOT), str(HERE), env.get("PYTHONPATH", "")) if p)
        return {**os.environ, "LEASELIB_TEST": json.dumps(conf), **env, "PYTHONPATH": path}

    def know(self, jobs: list[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        """Remembers how jobs are configured, for the judge of histories."""
        for job in jobs:
            given = {k: value for k, value in {**options, **job}.items() if k in JobOptionsDict.__annotations__}
            self._options.setdefault(job["name"], []).append(job_options(given))

    def configured(self, jobs: list[Mapping[str, Any]], options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """What an instance is told."""
        options = {**OPTIONS, **options}
        self.know(jobs, options)
        if isinstance(self._audit, audit.RedisAudit):
            more = {"before_scripts": self._audit.script, **more}
        return {"url": self.url, "journal": str(self.journal.path), "jobs": jobs, "options": options, **more}

    def run(self, command: list[str], conf: Mapping[str, Any], env: Mapping[str, str]) -> Instance:
        """Starts a program with that configuration."""
        stderr = self.folder / f"stderr-{len(self.instances)}"
        with stderr.open("wb") as file:
            popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=self.environment(conf, env), cwd=HERE
            )
        instance = Instance(self, popen, conf, stderr)
        self.instances.append(instance)
        return instance

    def spawn(
        self,
        *jobs: Mapping[str, Any],
        then: str = "forever",
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        conf: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Instance:
        """Starts one instance and doesn't wait for it."""
        command = [python, str(HERE / "instance_program.py")]
        return self.run(command, self.configured(list(jobs), options, then=then, **(conf or {})), env or {})

    def boot(self, count: int, *jobs: Mapping[str, Any], **kwargs: Any) -> list[Instance]:
        """Starts so many instances, and waits until all are started schedulers."""
        instances = [self.spawn(*jobs, **kwargs) for _ in range(count)]
        for instance in instances:
            self.wait("up", 20, pid=instance.pid)
        return instances

    def add(self, instances: list[Instance], *jobs: Mapping[str, Any], **job: Any) -> None:
        """Registers a job, or several, on running instances."""
        jobs = jobs or (job,)
        numbers = [(instance, instance.send("add", job=one)) for instance in instances for one in jobs]
        for instance, number in numbers:
            answer = instance.answer(number)
            assert answer is None, answer

    def of(self, fact: Fact) -> Instance:
        """The instance that noted a fact."""
        return next(i for i in self.instances if i.pid == fact["pid"])

    def go(self, job: str) -> None:
        """Lets the handlers of a job return, on every instance that runs."""
        for instance in self.instances:
            if instance.alive():
                instance.send("go", name=job)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def facts(self, fact: str | None = None, **match: Any) -> list[Fact]:
        """See Journal.facts."""
        return self.journal.facts(fact, **match)

    def events(self, name: str, **match: Any) -> list[Fact]:
        """The events of that name that listeners got."""
        return self.journal.facts("event", event=name, **match)

    def until(self, condition: Callable[[], Any], what: str, within_s: float = 10) -> Any:
        """Waits until the condition is true; returns what it returned."""
        try:
            return until(condition, what, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.complaints()}") from None

    def wait(self, fact: str, within_s: float = 10, count: int = 1, **match: Any) -> Fact:
        """Waits for such a fact, the count-th."""
        shown = {k: "(a condition)" if callable(v) else v for k, v in match.items()}
        found = self.until(
            lambda: f if len(f := self.facts(fact, **match)) >= count else None, f"{count} x {fact} {shown}", within_s
        )
        wanted: Fact = found[count - 1]
        return wanted

    def wait_event(self, name: str, within_s: float = 10, **match: Any) -> Fact:
        """Waits for such an event."""
        return self.wait("event", within_s, event=name, **match)

    def wait_until(self, at: float) -> None:
        """Lets time pass: until that monotonic time."""
        time.sleep(max(0.0, at - time.monotonic()))

    # ---- the store --------------------------------------------------------------------------------------------------

    def stored(self, job: str, slot_ms: int) -> leaselib.Run:
        """The run of that slot."""
        run = self.store.get(job, from_ms(slot_ms))
        assert run is not None, f"no run of {job} {slot_ms}"
        return run

    def wait_status(self, job: str, slot_ms: int, status: str, within_s: float = 5) -> leaselib.Run:
        """Waits until the run has that status."""

        def look() -> leaselib.Run | None:
            run = self.stored(job, slot_ms)
            return run if run.status == status else None

        found: leaselib.Run = self.until(look, f"{job} {slot_ms} is {status}", within_s)
        return found

    # ---- the end ----------------------------------------------------------------------------------------------------

    def complaints(self) -> str:
        """What the instances wrote to stderr, its end."""
        text = "".join(i.stderr.read_text(errors="replace") for i in self.instances)
        return f"stderr: {text[-3000:] or 'empty'}"

    def stop_all(self, within_s: float = 6) -> None:
        """SIGTERM to every instance that runs; each has to leave with status 0."""
        live = [i for i in self.instances if i.alive()]
        for instance in live:
            instance.terminate()
        for instance in live:
            instance.ended(within_s)

    def history(self) -> history.History:
        """What is known of this cluster, with the store's decisions if it is audited."""
        jobs = {name: history.JobProfile.of(options) for name, options in self._options.items()}
        killed = [{"fact": "killed", "pid": pid} for pid in self.killed]
        found = [] if self._audit is None else audit.decisions(self._audit.changes(), jobs, self.store.namespace)
        records = [run for job in self.store.jobs() for run in self.store.runs(job, limit=KEEP)]
        return history.History(found, self.facts() + killed, records, jobs)

    def excuse(self, *ids: str, why: str) -> None:
        """The test brings about what these invariants don't cover."""
        assert why
        self._excused.update(ids)

    def judge(self) -> None:
        """Fails if the history breaks an invariant."""
        assert_holds(self.history(), self._excused)

    def close(self, *, judged: bool = True) -> None:
        """Kills what still runs, descendants included; looks for faults of leaselib's own, and judges the history."""
        for instance in self.instances:
            if instance.popen.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    instance.popen.stdin.close()
            if instance.alive():
                instance.kill()
            instance.popen.wait()
        reaped = {i.pid for i in self.instances}
        for pid in {f["pid"] for f in self.facts()} - reaped:
            with contextlib.suppress(OSError):  # it has ended
                if str(self.journal.path).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)
        try:
            if judged:
                self.judge()
        finally:
            self.store.close()
            self.journal.close()
        faults = [word for word in OWN_FAULTS if word in self.complaints()]
        assert not faults, f"{faults} in {self.complaints()}"


# ---- checks on whole journals ---------------------------------------------------------------------------------------


def assert_holds(found: history.History, excused: Collection[str] = ()) -> None:
    """The history breaks no invariant, but perhaps those that are excused."""
    violations = [violation for violation in history.check(found) if violation.id not in excused]
    shown = "\n".join(map(str, violations[:10]))
    assert not violations, f"the history breaks {len(violations)} times what must hold:\n{shown}"


def assert_started_once(facts: list[Fact]) -> None:
    """Every run was started once, by whatever process."""
    seen: dict[tuple[str, int], Fact] = {}
    for fact in facts:
        if fact["fact"] == "start":
            first = seen.setdefault((fact["job"], fact["slot"]), fact)
            assert first is fact, f"started twice: {first} and {fact}"


def assert_all_started(facts: list[Fact], job: str, slots_ms: list[int]) -> None:
    """Every one of these slots was started.

    On a busy machine a slot may come while the finish of the one before is on its way: then it must be a visible skip,
    for that reason, and such slots must be few.
    """
    mine = [f for f in facts if f.get("job") == job]
    started = {f["slot"] for f in mine if f["fact"] == "start"}
    skipped = {f["slot"] for f in mine if f.get("event") == "skip" and f["reason"] in ("overlap", "superseded")}
    missing = [slot for slot in slots_ms if slot not in started]
    assert slots_ms, "the test looked at no slot"
    assert skipped.issuperset(missing), f"{job}: neither start nor skip of {sorted(set(missing) - skipped)}"
    assert len(missing) <= max(2, len(slots_ms) / 3), f"{job}: {len(missing)} of {len(slots_ms)} slots were skipped"


def state_of(pid: int) -> str:
    """A process's state as the system shows it: `T` is stopped, `Z` has ended, unwaited-for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    """Whether a process that is no child of ours has ended (one that nobody waited for has, too)."""
    try:
        return state_of(pid) == "Z"
    except OSError:
        return True


# ---- schedulers in the test's own process ---------------------------------------------------------------------------


class Recorder:
    """Listens to every event of a scheduler in this process. Called by its events thread, read by the test's.

    made: all since somebody emptied it; `own_history` does.
    """

    made: ClassVar[list[Recorder]] = []

    def __init__(self, scheduler: leaselib.Scheduler) -> None:
        self.made.append(self)
        self.scheduler = scheduler
        self.facts: list[Fact] = []
        self._events: list[leaselib.Event] = []
        self._changed = threading.Condition()
        for name in EVENT_NAMES:
            scheduler.on(name, self._take)

    def _take(self, event: leaselib.Event) -> None:
        fields = {name: getattr(event, name) for name in ("job", "attempt", "token", "reason")}
        slot_ms = None if event.slot is None else to_ms(event.slot)
        fact = {"t": time.monotonic(), "fact": "event", "pid": event.runner, "event": event.name, "slot": slot_ms}
        with self._changed:
            self.facts.append({**fact, **fields})
            self._events.append(event)
            self._changed.notify_all()

    def told_all(self) -> bool:
        """Whether every run of which it heard the start has ended in one way or another."""
        with self._changed:
            started = {event.token for event in self._events if event.name == "start"}
            return started <= {event.token for event in self._events if event.name in processes.LAST}

    def events(self, name: str, **match: Any) -> list[leaselib.Event]:
        """All events so far of that name, with such attributes."""
        with self._changed:
            found = list(self._events)
        return [e for e in found if e.name == name and fits({k: getattr(e, k) for k in match}, match)]

    def wait(self, name: str, within_s: float = 8, count: int = 1, **match: Any) -> leaselib.Event:
        """Waits for such an event, the count-th."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self._matching(name, match)) >= count, within_s)
            assert came, f"no {count} x {name} {match} within {within_s} s, only {self._events}"
            return self._matching(name, match)[count - 1]

    def _matching(self, name: str, match: Mapping[str, Any]) -> list[leaselib.Event]:
        return [e for e in self._events if e.name == name and fits({k: getattr(e, k) for k in match}, match)]


def own_history(url: str, decided: audit.Audit | None) -> history.History:
    """What is known of the schedulers in this process that recorders listened to, once they are all stopped.

    A run that none of them told of isn't held against them: not every scheduler of a test has a listener. A handler may
    outlive `stop()`, so its last event is waited for.
    """
    recorders, facts, options = list(Recorder.made), list[Fact](), dict[str, list[JobOptions]]()
    Recorder.made.clear()
    recorders = list({id(recorder.scheduler): recorder for recorder in recorders}.values())
    with contextlib.suppress(AssertionError):  # the judge will say it better
        until(lambda: all(recorder.told_all() for recorder in recorders), "handlers' last events", SLACK_S + LEASE_S)
    for recorder in recorders:
        facts += recorder.facts
        for job in recorder.scheduler.jobs.values():
            options.setdefault(job.name, []).append(job_options(job.options))
    facts += [{**fact, "fact": "main-end"} for fact in facts if fact["event"] == "stopped"]
    told = {fact["token"] for fact in facts}
    jobs = {name: history.JobProfile.of(them) for name, them in options.items()}
    with contextlib.closing(leaselib.open_store(url)) as store:
        records = [run for job in store.jobs() for run in store.runs(job, limit=KEEP)]
        found = [] if decided is None else audit.decisions(decided.changes(), jobs, store.namespace)
    return history.History(found, facts, [r for r in records if r.status == "running" or r.token in told], jobs)
