"""The fixtures of the tests with real processes. The registry of stores is in `cluster`.

After a test that passed, the history of its instances is judged by `history.check`: those of processes by what they
journaled, those in the test's own process by what their listeners got, and either by the store's decisions, where it is
audited. A test that brings about what an invariant doesn't cover says so, by `cluster.excuse`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cluster import (
    CLUSTER_STORES,
    DEFAULT_STORES,
    Cluster,
    Recorder,
    assert_holds,
    audited,
    own_history,
    sqlite,
)

PASSED = pytest.StashKey[bool]()
"""Whether the body of a test has passed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `cluster_url` runs once on each chosen store that is registered for clusters.

    Without a choice on the default only; the gate runs the rest beside the other tests, for all of them mostly wait.
    """
    if "cluster_store" in metafunc.fixturenames:
        option = metafunc.config.getoption("--stores")
        names = DEFAULT_STORES if option is None else [n for n in option.split(",") if n.strip() in CLUSTER_STORES]
        metafunc.parametrize("cluster_store", [name.strip() for name in names])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers which tests have passed, for the judge."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def cluster_url(cluster_store: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a place of its own in the store under test. Judges schedulers in this process that use it."""
    folder = tmp_path / "store"
    folder.mkdir()
    Recorder.made.clear()
    with CLUSTER_STORES[cluster_store](folder) as url:
        alone = "cluster" not in request.fixturenames
        decided = audited(url) if alone else None
        yield url
        if alone and request.node.stash.get(PASSED, False):
            assert_holds(own_history(url, decided))


@pytest.fixture
def cluster(cluster_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster on the store under test, without instances yet."""
    it = Cluster(cluster_url, tmp_path)
    yield it
    it.close(judged=request.node.stash.get(PASSED, False))


@pytest.fixture
def sqlite_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster on a SQLite file, for what only SQLite has: a clock that is the machine's, a lock that others hold."""
    with sqlite(tmp_path) as url:
        it = Cluster(url, tmp_path)
        yield it
        it.close(judged=request.node.stash.get(PASSED, False))
