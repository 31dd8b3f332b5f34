"""A Flask application under gunicorn, whose scheduler starts with it: in each worker, and with --preload in the master.

What is asserted: every process is an instance of its own, each slot runs once over all of them, handlers run inside the
application's context, and SIGTERM to the master hands runs over and ends everything long before the graceful time-out.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    BEAT_S,
    SLACK_S,
    Cluster,
    Instance,
    assert_all_started,
    assert_started_once,
    due_in,
    gone,
    slots_between,
    wall_ms,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]

WORKERS = 2
GRACEFUL_S = 20
GONE_S = 4.0
"""After SIGTERM every process is gone within so many seconds."""


def free_port() -> int:
    """A port of this machine's that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(cluster: Cluster, kind: str, preload: bool, *jobs: dict[str, Any], **options: Any) -> tuple[Instance, int]:
    """Starts gunicorn; returns its master and its port."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "instance_program:make_app()", "--bind", f"127.0.0.1:{port}"]
    command += ["--workers", str(WORKERS), "--worker-class", kind, "--graceful-timeout", str(GRACEFUL_S)]
    command += ["--worker-tmp-dir", str(cluster.folder), "--no-control-socket"]
    command += ["--preload"] * preload + ["--threads", "2"] * (kind == "gthread")
    return cluster.run(command, cluster.configured(list(jobs), options), {}), port


def healthz(port: int) -> dict[str, Any]:
    """What a worker answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def instances_of(cluster: Cluster, count: int) -> dict[int, str]:
    """Waits until so many processes have run something; their names by process id."""
    names: dict[int, set[str]] = {}

    def look() -> bool:
        for fact in cluster.facts("start"):
            names.setdefault(fact["pid"], set()).add(fact["runner"])
        return len(names) >= count

    cluster.until(look, f"{count} processes run jobs", 15)
    assert all(len(of_one) == 1 for of_one in names.values()), names
    return {pid: next(iter(of_one)) for pid, of_one in names.items()}


@pytest.mark.parametrize("preload", [False, True], ids=["each", "preload"])
@pytest.mark.parametrize("kind", ["sync", "gthread"])
def test_every_process_of_gunicorn_is_an_instance_and_sigterm_hands_over(
    cluster: Cluster, kind: str, preload: bool
) -> None:
    """A second program on the same store takes the running handler over at its next check."""
    ticks = [{"name": f"tick{n}", "do": "quick", "every_ms": 200} for n in range(3)]
    master, port = serve(cluster, kind, preload, *ticks)
    names = instances_of(cluster, WORKERS + preload)
    assert len(set(names.values())) == WORKERS + preload
    assert (master.pid in names) is preload
    health = healthz(port)
    assert health["started"]
    assert names[health["pid"]] == health["runner"], "the worker that answers runs jobs under its own name"
    first_ms = wall_ms()
    (other,) = cluster.boot(1, *ticks)
    last_ms = wall_ms() + 600
    cluster.wait("start", job="tick0", slot=lambda slot: slot > last_ms)
    cluster.wait("start", pid=other.pid)
    told = master.terminate()
    master.ended(GONE_S)
    for pid in names:
        cluster.until(lambda pid=pid: gone(pid), f"process {pid} has ended", max(0.1, told + GONE_S - time.monotonic()))
        assert cluster.events("stopped", pid=pid), "it stopped, rather than being killed"
    assert_started_once(cluster.facts())
    assert_all_started(cluster.facts(), "tick0", slots_between(200, first_ms, last_ms))
    assert not cluster.events("lost")


@pytest.mark.parametrize("preload", [False, True], ids=["each", "preload"])
@pytest.mark.parametrize("kind", ["sync", "gthread"])
def test_a_run_of_a_worker_is_handed_over_on_sigterm(cluster: Cluster, kind: str, preload: bool) -> None:
    """It runs inside the application's context, and the next attempt comes within two heartbeats of the release.

    The next one may be the server's own: its processes are stopped one after the other, the preloading master last. The
    other program, which stays, has the run in the end, and each attempt comes in time after the release before it.
    """
    job = {"name": "work", "do": "in_app", "every_ms": due_in(1.2)}
    master, _ = serve(cluster, kind, preload, job)
    start = cluster.wait("start", 15)
    assert cluster.wait("app", pid=start["pid"])["name"] == "leaselib_test_app"
    (other,) = cluster.boot(1, {**job, "do": "quick"})
    cluster.until(lambda: other.tell("health")["backups_held"] == 1, "the other program watches the run")
    told = master.terminate()
    last = cluster.wait("start", GONE_S + 2 * BEAT_S + SLACK_S, slot=start["slot"], pid=other.pid)
    starts = cluster.facts("start", slot=start["slot"])
    assert [taken["attempt"] for taken in starts] == list(range(1, last["attempt"] + 1))
    for before, taken in itertools.pairwise(starts):
        released = cluster.wait_event("interrupted", token=before["token"])
        assert (released["handed_over"], taken["reason"]) == (True, "hand-over")
        assert taken["t"] - released["t"] < 2 * BEAT_S + SLACK_S
    master.ended(max(0.1, told + GONE_S - time.monotonic()))
    assert cluster.wait_status("work", start["slot"], "success").attempt == last["attempt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_worker_that_ends_is_replaced_and_the_others_go_on(cluster: Cluster, number: signal.Signals) -> None:
    """gunicorn starts another worker, which is a new instance; what ran in the killed one is taken over."""
    ticks = [{"name": f"tick{n}", "do": "quick", "every_ms": 200} for n in range(2)]
    master, _ = serve(cluster, "gthread", True, *ticks)
    names = instances_of(cluster, WORKERS + 1)
    worker = next(pid for pid in names if pid != master.pid)
    os.kill(worker, number)
    cluster.until(lambda: gone(worker), "the worker has ended", GONE_S)
    names = instances_of(cluster, WORKERS + 2)
    assert len(set(names.values())) == WORKERS + 2
    assert_started_once(cluster.facts())
    at = time.monotonic()
    for pid in names:
        if pid != worker:
            cluster.wait("start", pid=pid, t=lambda t, at=at: t > at)
    master.terminate()
    master.ended(GONE_S)


def test_an_application_imported_by_a_plain_script_needs_no_server(cluster: Cluster, tmp_path: Path) -> None:
    """make_app() in a script: the scheduler runs while the script does, and the end of the script hands over."""
    script = tmp_path / "script.py"
    script.write_text(
        "import instance_program\n"
        "app = instance_program.make_app()\n"
        "with app.test_client() as client:\n"
        "    assert client.get('/healthz').get_json()['started']\n"
        "instance_program.first_start()\n"
    )
    conf = cluster.configured([{"name": "work", "do": "in_app", "every_ms": due_in(0.6)}], {})
    program = cluster.run([sys.executable, str(script)], conf, {})
    start = cluster.wait("start", 15)
    program.ended(GONE_S)
    run = cluster.stored("work", start["slot"])
    assert (run.status, run.released) == ("running", True)
