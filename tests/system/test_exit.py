"""The end of a process, on every Python found on this machine from 3.10 up: it ends in time, and its runs are handed
over.

One test is one way to end; each runs it on all Pythons at once. leaselib's dependencies are pure Python, so the other
interpreters are given those that this one has, through a folder of links.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import CLUSTER_STORES, LEASE_S, ROOT, SLACK_S, Cluster, due_in, gone

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]

EXIT_S = 2.0
"""A process whose handlers listen to their signals ends within so many seconds."""
SLEEPER = {"name": "work", "do": "sleep", "seconds": 30}


def find_pythons() -> dict[str, str]:
    """The interpreters of this machine from 3.10 up, one per minor version: `3.12` and its path.

    Looks along PATH, and where pyenv keeps what it built. This one is always among them.
    """
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    folders = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    folders += sorted(versions.glob("*/bin"))
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for folder in folders:
        for path in sorted(folder.glob("python3.[0-9]*")):
            name = re.fullmatch(r"python(3\.\d+)", path.name)
            if name and int(name[1][2:]) >= 10 and name[1] not in found and runs(path, name[1]):
                found[name[1]] = str(path)
    return dict(sorted(found.items(), key=lambda item: int(item[0][2:])))


def runs(path: Path, version: str) -> bool:
    """Whether it is such an interpreter: a shim of pyenv's may lead nowhere, and a build may lack SQLite."""
    program = "import sys, sqlite3; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError):
        done = subprocess.run([path, "-c", program], capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip() == version
    return False


def link_dependencies(folder: Path) -> None:
    """Fills a folder with links to what leaselib needs, as installed for the Python that runs this."""
    waiting, seen = ["croniter", "tenacity"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            assert file.suffix not in (".so", ".pyd"), f"{name} isn't pure Python: {file}"
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0])


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By version: what to hand to Cluster.spawn so that it uses that Python."""
    folder = tmp_path_factory.mktemp("dependencies")
    link_dependencies(folder)
    env = {"PYTHONPATH": str(folder)}
    found = {version: {"python": path, "env": env} for version, path in find_pythons().items()}
    for version, how in found.items():
        done = subprocess.run(
            [how["python"], "-W", "error", "-c", "import leaselib"],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"leaselib can't be imported by Python {version}: {done.stderr}"
    return found


@pytest.fixture
def clusters(
    pythons: dict[str, dict[str, Any]], cluster_store: str, tmp_path: Path
) -> Iterator[dict[str, Cluster]]:
    """By Python's version: a cluster whose `spawn` uses it. Stores with drivers run on this one only."""
    with contextlib.ExitStack() as opened:
        found: dict[str, Cluster] = {}
        for version, how in pythons.items():
            if cluster_store != "sqlite" and how["python"] != sys.executable:
                continue
            folder = tmp_path / version
            folder.mkdir()
            cluster = Cluster(opened.enter_context(CLUSTER_STORES[cluster_store](folder)), folder)
            opened.callback(cluster.close)
            cluster.spawn = functools.partial(cluster.spawn, **how)  # type: ignore[method-assign]
            found[version] = cluster
        yield found


def on_all(clusters: dict[str, Cluster], check: Callable[[Cluster], None]) -> None:
    """Checks each; tells on which Pythons it didn't hold."""
    errors = {}
    for version, cluster in clusters.items():
        try:
            check(cluster)
        except AssertionError as error:
            errors[version] = error
    assert not errors, "\n".join(f"Python {version}: {error}" for version, error in errors.items())


def assert_released(cluster: Cluster, job: str = "work") -> None:
    """The job's run was handed over: its handler was aborted for a stop, and its lease is over."""
    start, end = cluster.facts("start", job=job)[0], cluster.wait("end", job=job)
    assert (end["how"], end["abort_reason"]) == ("Aborted", "stopping")
    run = cluster.stored(job, start["slot"])
    assert (run.status, run.released, run.handovers) == ("running", True, 1), run
    event = cluster.wait_event("interrupted", job=job)
    assert event["handed_over"]
    assert not cluster.events("lost")


def test_this_python_is_found_and_shims_that_lead_nowhere_are_not() -> None:
    """Each path that was found is of the version that it was found for."""
    found = find_pythons()
    assert found[f"3.{sys.version_info.minor}"] == sys.executable
    for version, path in found.items():
        assert runs(Path(path), version)


def test_a_main_thread_that_ends_takes_a_sleeping_handler_with_it(clusters: dict[str, Cluster]) -> None:
    """No concurrent.futures, no thread that isn't a daemon: the exit reaches the stop at once."""
    for cluster in clusters.values():
        cluster.spawn({**SLEEPER, "every_ms": due_in(0.5)}, then="end")

    def check(cluster: Cluster) -> None:
        ended = cluster.wait("main-end", 20)["t"]
        cluster.instances[0].ended(max(0.1, ended + EXIT_S - time.monotonic()))
        assert_released(cluster)
        assert cluster.events("stopped")

    on_all(clusters, check)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_run_forever_ends_the_process(clusters: dict[str, Cluster], number: signal.Signals) -> None:
    """With status 0, the run handed over."""
    for cluster in clusters.values():
        cluster.spawn({**SLEEPER, "every_ms": due_in(0.5)})

    def check(cluster: Cluster) -> None:
        cluster.wait("start", 20)
        cluster.instances[0].popen.send_signal(number)
        cluster.instances[0].ended(EXIT_S)
        assert_released(cluster)

    on_all(clusters, check)


def test_after_a_fork_parent_and_child_end_on_their_own(clusters: dict[str, Cluster]) -> None:
    """The child's end stops nothing of the parent's; the parent hands over the run that is its own."""
    for cluster in clusters.values():
        cluster.spawn({**SLEEPER, "every_ms": due_in(0.5)}, then="fork")

    def check(cluster: Cluster) -> None:
        child = cluster.wait("forked", 20)["child"]
        ends = [cluster.wait("main-end", 20, pid=pid)["t"] for pid in (child, cluster.instances[0].pid)]
        cluster.instances[0].ended(max(0.1, max(ends) + EXIT_S - time.monotonic()))
        cluster.until(lambda: gone(child), "the child has ended", EXIT_S)
        assert {f["pid"] for f in cluster.facts("end")} <= {cluster.instances[0].pid}
        assert_released(cluster)

    on_all(clusters, check)


def test_a_handler_that_ignores_its_signal_does_not_hold_the_process(clusters: dict[str, Cluster]) -> None:
    """stop() returns False after stop_timeout, the process ends, and the run's lease is left to run out."""
    timeout_s = 0.5
    for cluster in clusters.values():
        job = {"name": "work", "do": "deaf", "seconds": 60, "every_ms": due_in(0.5)}
        cluster.spawn(job, then="stop_and_end", stop_timeout=timeout_s)

    def check(cluster: Cluster) -> None:
        cluster.excuse("S19", why="the process ends while the handler is at work, which nobody can tell of")
        start = cluster.wait("start", 20)
        stopped = cluster.wait("stopped", 20)
        assert stopped["result"] is False
        assert timeout_s <= stopped["seconds"] < timeout_s + SLACK_S
        cluster.instances[0].ended(EXIT_S)
        assert cluster.facts("told", abort_reason="stopping")
        run = cluster.stored("work", start["slot"])
        assert (run.status, run.released) == ("running", False)

    on_all(clusters, check)


def test_a_handler_that_ignores_its_signal_holds_the_exit_for_stop_timeout_only(clusters: dict[str, Cluster]) -> None:
    """The same when nobody calls stop() and the main thread just ends."""
    timeout_s = 0.5
    for cluster in clusters.values():
        job = {"name": "work", "do": "deaf", "seconds": 60, "every_ms": due_in(0.5)}
        cluster.spawn(job, then="end", stop_timeout=timeout_s)

    def check(cluster: Cluster) -> None:
        cluster.excuse("S19", why="the process ends while the handler is at work, which nobody can tell of")
        ended = cluster.wait("main-end", 20)["t"]
        cluster.instances[0].ended(max(0.1, ended + timeout_s + EXIT_S - time.monotonic()))
        run = cluster.stored("work", cluster.facts("start")[0]["slot"])
        assert (run.status, run.released) == ("running", False)

    on_all(clusters, check)


def test_young_runs_get_heartbeats_after_the_main_thread_has_ended(clusters: dict[str, Cluster]) -> None:
    """A thread of the application's keeps the process alive, and some Pythons refuse new threads meanwhile: a run that
    was younger than one heartbeat when the main thread ended is renewed all the same, and ends as a success; slots
    that come later run too.
    """
    lives_s = 2 * LEASE_S + 0.6
    for cluster in clusters.values():
        jobs = [
            {"name": "work", "do": "sleep", "seconds": 2 * LEASE_S, "every_ms": due_in(0.5)},
            {"name": "tick", "do": "quick", "every_ms": 400},
        ]
        cluster.spawn(*jobs, then="outlived", conf={"seconds": lives_s + 1})

    def check(cluster: Cluster) -> None:
        main_end = cluster.wait("main-end", 20)
        start = cluster.wait("start", job="work")
        end = cluster.wait("end", 3 * LEASE_S + SLACK_S, job="work")
        assert (end["how"], end["abort_reason"]) == ("returned", None)
        cluster.instances[0].ended(lives_s + 1 + EXIT_S)
        run = cluster.stored("work", start["slot"])
        assert (run.status, run.attempt) == ("success", 1)
        assert not cluster.events("lost")
        assert len(cluster.facts("start", job="tick", t=lambda t: t > main_end["t"])) >= 3

    on_all(clusters, check)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_hands_its_runs_over_when_it_ends(
    clusters: dict[str, Cluster], method: str
) -> None:
    """Though some Pythons run no atexit there. A forked child starts afresh, with a name of its own."""
    for cluster in clusters.values():
        job = {**SLEEPER, "every_ms": 250, "overlap": "allow", "catch_up": 0, "max_late": 0.2}
        cluster.spawn(job, then="mp", conf={"method": method}, max_workers=1)

    def check(cluster: Cluster) -> None:
        parent = cluster.instances[0]
        target = cluster.wait("target-end", 20)
        ended = cluster.wait("child-ended", EXIT_S + 1)
        assert ended["status"] == 0
        assert ended["t"] - target["t"] < EXIT_S
        parent.ended(EXIT_S)
        for pid in (parent.pid, ended["child"]):
            start = cluster.facts("start", pid=pid)[0]
            end = cluster.wait("end", token=start["token"])
            assert (end["how"], end["abort_reason"], end["pid"]) == ("Aborted", "stopping", pid)
            run = cluster.stored("work", start["slot"])
            assert (run.status, run.released) == ("running", True)
        assert len({f["runner"] for f in cluster.facts("start")}) == 2
        assert not cluster.events("lost")

    on_all(clusters, check)


@pytest.mark.parametrize(("do", "status"), [("fork_and_exit", 0), ("fork_and_return", 0), ("fork_and_raise", 7)])
def test_a_fork_from_inside_a_handler_leaves_the_run_to_the_parent(
    clusters: dict[str, Cluster], do: str, status: int
) -> None:
    """Also if the child leaves the handler as well: its signal is set, that is no finish, and the process ends."""
    for cluster in clusters.values():
        cluster.spawn({"name": "work", "do": do, "every_ms": due_in(0.5)})

    def check(cluster: Cluster) -> None:
        instance = cluster.instances[0]
        ended = cluster.wait("child-ended", 20)
        assert (ended["status"], ended["pid"]) == (status, instance.pid)
        cluster.wait_event("success", 5)
        run = cluster.wait_status("work", ended_slot(cluster), "success")
        assert run.attempt == 1
        assert [f["signal"] for f in cluster.facts("child-goes-on")] == [True] * (do != "fork_and_exit")
        assert len(cluster.facts("start")) == 1
        assert not cluster.events("lost")
        instance.terminate()
        instance.ended(EXIT_S)

    on_all(clusters, check)


def ended_slot(cluster: Cluster) -> int:
    """The slot of the cluster's first start."""
    slot: int = cluster.facts("start")[0]["slot"]
    return slot


def test_a_subprocess_with_preexec_fn_never_claims(clusters: dict[str, Cluster]) -> None:
    """Between fork and exec the child is a copy of this program; it stays quiet, and passes no descriptor on."""
    for cluster in clusters.values():
        job = {"name": "tick", "do": "quick", "every_ms": 200, "overlap": "allow"}
        cluster.spawn(job, then="subprocesses", conf={"foreign": cluster.file or "socket:"})

    def check(cluster: Cluster) -> None:
        done = cluster.wait("subprocess-ended", 20, count=2)
        assert {f["status"] for f in cluster.facts("subprocess-ended")} == {0}
        instance = cluster.instances[0]
        cluster.wait("start", 5, t=lambda t: t > done["t"])
        instance.terminate()
        instance.ended(EXIT_S)
        assert {f["pid"] for f in cluster.facts("start")} == {instance.pid}
        assert len({run.runner for run in cluster.store.runs("tick")}) == 1
        assert all(run.attempt == 1 for run in cluster.store.runs("tick"))
        slots = sorted(f["slot"] for f in cluster.facts("start"))
        assert {b - a for a, b in itertools.pairwise(slots)} == {200}, "the parent went on meanwhile"

    on_all(clusters, check)
