"""Whatever happens to instances, ways and servers: no run is held by two, none is lost, and all goes on afterwards.

The seeds are fixed here; `python -m tests.chaos` from the project's root draws others, and runs for as long as wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import drive, plan, sweep
from cluster import Cluster
from fix_proxy import Proxy

pytestmark = pytest.mark.system

SECONDS = 20.0
"""Times `--effort`, which is 3 in the gate."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("store", drive.STORES)
def test_no_rule_is_broken_under_faults_and_all_jobs_run_again_afterwards(
    store: str, effort: int, tmp_path: Path
) -> None:
    """Four instances, five jobs, faults from one seed in the first two thirds of the time."""
    result = drive.run(store, drive.DEFAULT_SEEDS[store], SECONDS * effort, tmp_path)
    print(result.summary)
    result.require()
    # That the run reached what it is for; a quiet one proves nothing.
    assert len(result.faults) >= 15 * effort, result.summary
    given_up = ("starts by takeover", "starts by hand-over", "events interrupted")
    assert sum(result.counts[what] for what in given_up) >= 1, result.summary
    assert result.counts["events lost"] >= 1, result.summary
    assert result.counts["passed checks"] >= 500 * effort, result.summary
    assert result.counts["decisions"] >= 2 * result.counts["handler starts"] > 0, result.summary


@pytest.mark.parametrize("store", drive.STORES)
@pytest.mark.timeout(10)
def test_a_seed_names_its_faults(store: str) -> None:
    """The same seed gives the same faults, another one others; every kind comes up; the last third is free of them."""
    faults = plan.draw(7, store, 600)
    assert faults == plan.draw(7, store, 600)
    assert faults != plan.draw(8, store, 600)
    assert {fault.kind for fault in faults} == set(plan.kinds_of(store))
    assert max(fault.at_s + fault.seconds for fault in faults) <= 400.1


@pytest.fixture(scope="module", params=["redis", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Any]]:
    """The store's name, the URL of a place of its own, and its server."""
    with drive.place(request.param, tmp_path_factory.mktemp("place")) as (url, server):
        yield request.param, url, server


@pytest.mark.timeout(60)
@pytest.mark.parametrize("operation", sweep.OPERATIONS)
def test_a_lost_answer_costs_no_run_and_doubles_none(server: tuple[str, str, Any], operation: str) -> None:
    """The first answer to each operation is lost after it was carried out: the run is executed once and succeeds.

    For a release that is: once by who handed it over, and once more, to its end, by who took it.
    """
    store, url, process = server
    with Proxy(("127.0.0.1", process.port)) as proxy:
        far = url.replace(f":{process.port}/", f":{proxy.port}/")
        told = sweep.lose_answer(store, proxy, url, far, operation)
    assert told.carried_out(operation), told.between
    assert told.troubles == 1, "the answer was lost, and nothing else was"
    assert told.sent >= 2, "what had no answer was sent again"
    assert told.run.status == "success"
    assert told.lost == 0
    attempts = [1, 2] if operation == "release" else [1]
    assert [attempt for attempt, _ in told.starts] == attempts
    assert told.starts[-1] == (told.run.attempt, told.run.token)
    assert told.run.handovers == len(attempts) - 1
    assert told.reasons[1:] == ["hand-over"] * (len(attempts) - 1)


def test_a_cluster_whose_history_is_wrong_fails_when_it_is_closed(tmp_path: Path) -> None:
    """By what a process journaled, and by what the store decided; not if the test has said why that is right."""
    fact = {"t": 1.0, "fact": "start", "pid": 1, "job": "job", "slot": 0, "attempt": 1, "token": "a", "fence": 1}
    line = json.dumps({**fact, "resume": None}) + "\n"
    for name, lines, wanted in (("journal", [line, line], "S16"), ("store", [line], "S15"), ("excused", [line], "")):
        folder = tmp_path / name
        folder.mkdir()
        cluster = Cluster(f"sqlite:///{folder / 'leases.db'}", folder)
        cluster.store.claim("job", cluster.store.now(), "b", "r", lease=1)
        cluster.journal.path.write_text("".join(lines))
        if not wanted:
            cluster.excuse("S15", why="this test invents the fact")
            cluster.close()
        else:
            with pytest.raises(AssertionError, match=f"(?s)what must hold.*{wanted}"):
                cluster.close()
