"""The fixtures of the tests with real processes. The registry of stores is in `cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import CLUSTER_STORES, DEFAULT_STORES, Cluster, sqlite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `cluster_url` runs once on each chosen store that is registered for clusters."""
    if "cluster_store" in metafunc.fixturenames:
        option = metafunc.config.getoption("--stores")
        names = DEFAULT_STORES if option is None else [n for n in option.split(",") if n.strip() in CLUSTER_STORES]
        metafunc.parametrize("cluster_store", [name.strip() for name in names])


@pytest.fixture
def cluster_url(cluster_store: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a place of its own in the store under test."""
    folder = tmp_path / "store"
    folder.mkdir()
    with CLUSTER_STORES[cluster_store](folder) as url:
        yield url


@pytest.fixture
def cluster(cluster_url: str, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster on the store under test, without instances yet."""
    it = Cluster(cluster_url, tmp_path)
    yield it
    it.close()


@pytest.fixture
def sqlite_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster on a SQLite file, for what only SQLite has: a clock that is the machine's, a lock that others hold."""
    with sqlite(tmp_path) as url:
        it = Cluster(url, tmp_path)
        yield it
        it.close()
