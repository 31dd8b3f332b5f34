"""PostgreSQL's schema: created by eight at once, upgraded under an old instance, in another place, with few rights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from fix_servers_postgres import PostgresServer, pgbouncer, postgres_server, wait_until

from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores._postgres import PostgresStore
from leaselib.stores._postgres_connection import Connection, Deadline
from leaselib.stores._postgres_schema import VERSION, create, grants_sql, migrations, quoted, schema_sql

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
EIGHT = """
import json, sys
from leaselib.stores._postgres import PostgresStore
store = PostgresStore(sys.argv[1])
sys.stdin.readline()
store.create_schema(timeout=30)
answer = store.claim("job", store.now().replace(microsecond=0), sys.argv[2], "r")
print(json.dumps([answer.outcome, answer.epoch]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server for this module."""
    with postgres_server(options={"idle_in_transaction_session_timeout": "200ms"}) as own:
        yield own


@pytest.fixture
def database(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of the test's own."""
    name = f"db_{abs(hash(request.node.name)) % 10**9}"
    server.sql(f"CREATE DATABASE {name}")
    yield name
    server.sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def url(server: PostgresServer, database: str) -> str:
    """The superuser's URL of that database."""
    return server.url(database=database)


def catalog(server: PostgresServer, database: str) -> list[tuple[str, ...]]:
    """Everything that is in the schema."""
    schema = "leaselib"
    return server.sql(
        f"SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns "
        f"WHERE table_schema = '{schema}' "
        f"UNION ALL SELECT tablename, indexname, indexdef, '' FROM pg_indexes WHERE schemaname = '{schema}' "
        f"UNION ALL SELECT p.proname, p.oid::regprocedure::text, p.prosrc, p.proacl::text FROM pg_proc p "
        f"WHERE p.pronamespace = '{schema}'::regnamespace "
        f"UNION ALL SELECT relname, relacl::text, reloptions::text, '' FROM pg_class "
        f"WHERE relnamespace = '{schema}'::regnamespace ORDER BY 1, 2, 3",
        database=database,
    )


def migrate(store: PostgresStore, after: int, to: int) -> None:
    """Runs migrations as an instance whose library ends at that version would."""
    with store._pool.connection(Deadline(10), urgent=True) as connection:
        create(connection, store.schema, after, Deadline(10), to=to)


class OldStore(PostgresStore):
    """An instance of the library as it was at schema version 1: it looks for no newer one, and calls its functions."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        for name, statement in self._statements.items():
            assert b"_1(" in statement, f"{name} calls a function that version 1 doesn't have"

    def _look(self, connection: Connection, deadline: Deadline, *, create: bool) -> None:
        return


# ---- creating --------------------------------------------------------------------------------------------------------


def test_eight_processes_create_the_schema_at_once_through_pgbouncer(server: PostgresServer, database: str) -> None:
    """All succeed, one of them wins the run, and nothing is left locked or open."""
    with pgbouncer(server, pool=4) as bouncer:
        url = bouncer.url().replace("/postgres", f"/{database}")
        argv = [sys.executable, "-c", EIGHT, url]
        children = [
            subprocess.Popen([*argv, f"t{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for n in range(8)
        ]
        idle: list[object] = []
        done = threading.Event()

        def watch() -> None:
            with server.admin() as connection:
                while not done.wait(0.005):
                    query = "SELECT query FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
                    idle.extend(connection.execute(query.encode()).fetchall())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [child.communicate(timeout=60)[0] for child in children]
        done.set()
        watcher.join()
        assert [child.returncode for child in children] == [0] * 8
        outcomes, epochs = zip(*(json.loads(answer) for answer in answers), strict=True)
        assert sorted(set(outcomes) - {"overlap", "superseded"}) in (["running", "won"], ["won"])
        assert outcomes.count("won") == 1
        assert len(set(epochs)) == 1
        assert not idle
        assert server.sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]


def test_creating_again_changes_nothing(server: PostgresServer, database: str, url: str) -> None:
    """Also after runs were stored, and by the administrator's script."""
    store = PostgresStore(url)
    store.create_schema()
    before = catalog(server, database)
    answer = store.claim("job", store.now().replace(microsecond=0), "t", "r")
    assert answer.outcome == "won"
    store.create_schema()
    PostgresStore(url).create_schema()
    with server.admin(database) as connection:
        connection.execute(schema_sql("leaselib").encode())
    assert catalog(server, database) == before
    assert store.get("job", answer.run.slot) == answer.run  # type: ignore[union-attr]


def test_the_administrators_script_makes_what_an_instance_makes(
    server: PostgresServer, database: str, url: str
) -> None:
    """The same tables, functions, indexes and rights; in whatever schema was asked for."""
    PostgresStore(url).create_schema()
    made = catalog(server, database)
    assert len(made) > 40
    server.sql("DROP SCHEMA leaselib CASCADE", database=database)
    with server.admin(database) as connection:
        connection.execute(schema_sql("leaselib").encode())
        connection.execute(schema_sql("made-by_DBA").encode())
    assert catalog(server, database) == made
    store = PostgresStore(url, schema="made-by_DBA", create=False)
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"


def test_the_url_names_another_schema_and_namespace(server: PostgresServer, url: str, database: str) -> None:
    """`?schema=NAME&namespace=NAME`: they see nothing of each other."""
    stores = [PostgresStore.from_url(f"{url}?schema=Other&namespace=n1"), PostgresStore(url), PostgresStore(url, "n1")]
    slot = stores[0].now().replace(microsecond=0)
    assert [store.claim("job", slot, f"t{n}", "r").outcome for n, store in enumerate(stores)] == ["won"] * 3
    assert stores[0].schema == "Other"
    found = server.sql("SELECT token FROM \"Other\".runs WHERE namespace = 'n1'", database=database)
    assert found == [("t0",)]


def test_a_role_with_a_hostile_search_path_changes_nothing(server: PostgresServer, database: str) -> None:
    """Its own clock and operators stand in front; leaselib's statements and functions look past them."""
    server.sql(
        "CREATE SCHEMA hostile",
        "CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''epoch''::timestamptz'",
        "CREATE FUNCTION hostile.floor(numeric) RETURNS numeric LANGUAGE sql AS 'SELECT 17::numeric'",
        f"ALTER DATABASE {database} SET search_path = hostile, pg_catalog, public",
        database=database,
    )
    store = PostgresStore(server.url(database=database))
    answer = store.claim("job", store.now().replace(microsecond=0), "t", "r")
    assert answer.outcome == "won"
    assert answer.now.year > 2020


# ---- where leaselib can't be -----------------------------------------------------------------------------------------


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def other_encoding(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The name and the encoding of a database that isn't in UTF8."""
    encoding = request.param
    name = f"in_{encoding.lower()}"
    server.sql(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    yield name, encoding
    server.sql(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_database_in_another_encoding_is_refused(server: PostgresServer, other_encoding: tuple[str, str]) -> None:
    """When the schema would be created, by instance and by script, and where it is already: what was found, what is
    needed, what to do. Nothing is left there."""
    database, encoding = other_encoding
    words = rf"encoding UTF8.*is {encoding}\. .*CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0"
    store = PostgresStore(server.url(database=database))
    for call in (store.create_schema, store.now, lambda: store.purge("job")):
        with pytest.raises(StoreError, match=words) as caught:
            call()  # type: ignore[operator]
        assert not caught.value.transient
    with server.admin(database) as connection:
        with pytest.raises(psycopg.errors.FeatureNotSupported, match=words):
            connection.execute(schema_sql().encode())
        connection.rollback()
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'leaselib'").fetchall() == []
        connection.execute("CREATE SCHEMA leaselib")
        connection.execute("CREATE TABLE leaselib.schema_version (one boolean, version integer, serves integer[])")
        connection.execute("INSERT INTO leaselib.schema_version VALUES (true, 2, '{1,2}')")
    for create_option in (True, False):
        with pytest.raises(StoreError, match=words) as caught:
            PostgresStore(server.url(database=database), create=create_option).now()
        assert not caught.value.transient


@pytest.mark.parametrize("text", ["日本語", "naïve ☃", "\U0001f600"])
def test_an_error_text_in_any_letters_is_kept(url: str, text: str) -> None:
    """Which is what the encoding is needed for. Whatever encoding the URL wants, names and texts go over in UTF8."""
    store = PostgresStore(f"{url}?client_encoding=LATIN1")
    slot = store.now().replace(microsecond=0)
    assert store.claim(text, slot, "t", "r").outcome == "won"
    assert store.finish(text, slot, "t", "failed", text)
    assert [(run.job, run.error) for run in store.runs(text)] == [(text, text)]


FOREIGN = {
    "a table": "CREATE TABLE {place}.jobs (id int, title text); GRANT SELECT ON {place}.jobs TO PUBLIC",
    "an empty table of leaselib's shape": "CREATE TABLE {place}.namespaces (namespace text, epoch text)",
    "a view": "CREATE VIEW {place}.runs AS SELECT 1 AS one",
    "another tool's versions": "CREATE TABLE {place}.schema_version (version varchar(20), script text)",
    "a sequence": "CREATE SEQUENCE {place}.jobs",
    "a type": "CREATE TYPE {place}.runs AS ENUM ('a')",
    "a function": "CREATE FUNCTION {place}.get_1(text, text, bigint) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "a function with other arguments": "CREATE FUNCTION {place}.finish_in_2() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "an index": "CREATE TABLE {place}.mine (x int); CREATE INDEX runs_running ON {place}.mine (x)",
}


def everything_in(server: PostgresServer, database: str, place: str) -> list[object]:
    """The relations, types and functions of a schema, with their rights."""
    return server.sql(
        f"SELECT 'r', relname, relacl::text FROM pg_class WHERE relnamespace = '{place}'::regnamespace "
        f"UNION ALL SELECT 't', typname, typacl::text FROM pg_type WHERE typnamespace = '{place}'::regnamespace "
        f"UNION ALL SELECT 'f', oid::regprocedure::text || md5(prosrc), proacl::text FROM pg_proc "
        f"WHERE pronamespace = '{place}'::regnamespace ORDER BY 1, 2",
        database=database,
    )


@pytest.mark.parametrize("place", ["public", "leaselib"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_leaselibs_is_neither_adopted_nor_changed(
    server: PostgresServer, database: str, url: str, kind: str, place: str
) -> None:
    """A schema that holds something of another program's under one of leaselib's names is refused as a whole."""
    server.sql(f"CREATE SCHEMA IF NOT EXISTS {place}", FOREIGN[kind].format(place=place), database=database)
    before = everything_in(server, database, place)
    words = rf"{place}.* (jobs|namespaces|runs|schema_version|get_1\(\)|finish_in_2\(\)|runs_running)\. .*\?schema=NAME"
    for call in (PostgresStore(url, schema=place).create_schema, PostgresStore(url, schema=place).now):
        with pytest.raises(StoreError, match=words) as caught:
            call()
        assert not caught.value.transient
    with server.admin(database) as connection, pytest.raises(psycopg.errors.DuplicateObject, match=words):
        connection.execute(schema_sql(place).encode())
    assert everything_in(server, database, place) == before
    other = PostgresStore(url, schema="of_its_own")
    assert other.claim("job", other.now().replace(microsecond=0), "t", "r").outcome == "won"


def test_an_upgrade_adopts_nothing_either(server: PostgresServer, database: str, url: str) -> None:
    """A name that the next version brings was taken since."""
    store = PostgresStore(url)
    migrate(store, 0, 1)
    server.sql(FOREIGN["a function with other arguments"].format(place="leaselib"), database=database)
    before = everything_in(server, database, "leaselib")
    with pytest.raises(StoreError, match=r"finish_in_2\(\).*\?schema=NAME"):
        store.now()
    assert everything_in(server, database, "leaselib") == before
    assert server.sql("SELECT version FROM leaselib.schema_version", database=database) == [(1,)]


def test_a_schema_with_other_tables_is_shared(server: PostgresServer, database: str, url: str) -> None:
    """`?schema=public` beside an application's tables of other names: theirs are as before, and it may be repeated."""
    server.sql(
        "CREATE TABLE public.orders (id int PRIMARY KEY)", "GRANT SELECT ON public.orders TO PUBLIC", database=database
    )
    acl = "SELECT relacl::text FROM pg_class WHERE relname = 'orders'"
    before = server.sql(acl, database=database)
    for _ in range(2):
        store = PostgresStore(url, schema="public")
        store.create_schema()
        with server.admin(database) as connection:
            connection.execute(schema_sql("public").encode())
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"
    assert server.sql(acl, database=database) == before


def test_the_guards_know_every_name_that_the_migrations_create() -> None:
    """Each version's, so that no later one can be forgotten."""
    for version in range(1, VERSION + 1):
        sql = migrations("leaselib", version - 1, version)
        created = re.findall(r'CREATE TABLE IF NOT EXISTS "leaselib"\.(\w+)', sql)
        created += re.findall(r'CREATE OR REPLACE FUNCTION "leaselib"\.(\w+)', sql)
        created += re.findall(r"CREATE INDEX IF NOT EXISTS (\w+)", sql)
        assert len(created) == len(re.findall(r"^CREATE ", sql, re.MULTILINE)), "a statement of another form"
        lists = re.findall(r"v_(?:relations|functions) CONSTANT text\[\] := '{(.*?)}'", sql, re.DOTALL)
        assert sorted(re.findall(r"\w+", ",".join(lists))) == sorted(created)


def test_eight_instances_of_a_role_with_another_isolation_level_create_it_at_once(
    server: PostgresServer, database: str
) -> None:
    """What they look at is what the one before them has made."""
    server.sql(f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")
    ready, failures = threading.Barrier(8), []

    def create_one() -> None:
        store = PostgresStore(server.url(database=database))
        ready.wait(20)
        try:
            store.create_schema()
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=create_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert server.sql("SELECT version FROM leaselib.schema_version", database=database) == [(VERSION,)]


# ---- versions --------------------------------------------------------------------------------------------------------


def test_upgrading_from_version_1_while_an_old_instance_runs(server: PostgresServer, database: str, url: str) -> None:
    """Not one of its calls fails before, during or after; afterwards the schema is as a fresh one."""
    old = OldStore(url)
    migrate(old, 0, 1)
    assert server.sql("SELECT version FROM leaselib.schema_version", database=database) == [(1,)]
    done, lives = threading.Event(), [0, 0]
    failures: list[BaseException] = []

    def live(number: int) -> None:
        start = old.now().replace(microsecond=0)
        try:
            while not done.is_set():
                slot = start + timedelta(milliseconds=lives[number])
                job, token = f"job{number}", f"t{lives[number]}"
                assert old.claim(job, slot, token, "old").outcome == "won"
                assert old.heartbeat(job, slot, token, 30)
                assert old.release(job, slot, token)
                assert old.claim(job, slot, token + "b", "old", takeover_of=1).outcome == "won"
                assert old.finish(job, slot, token + "b", "success")
                lives[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: failures or min(lives) > 20, "lives before the upgrade")
        new = PostgresStore(url)
        new.create_schema()
        assert server.sql("SELECT version FROM leaselib.schema_version", database=database) == [(VERSION,)]
        after = list(lives)
        wait_until(lambda: failures or min(b - a for a, b in zip(after, lives, strict=True)) > 20, "lives after it")
        slot = new.now().replace(microsecond=0)
        assert new.claim("new", slot, "t", "new").outcome == "won"
        with psycopg.connect(url) as connection:
            assert new.confirm(connection, "new", slot, "t")
    finally:
        done.set()
        for thread in threads:
            thread.join(20)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    upgraded = catalog(server, database)
    server.sql("DROP SCHEMA leaselib CASCADE", database=database)
    PostgresStore(url).create_schema()
    assert catalog(server, database) == upgraded


def test_the_first_operation_upgrades(server: PostgresServer, database: str, url: str) -> None:
    """Whoever starts with the newer library needs no command."""
    store = PostgresStore(url)
    migrate(store, 0, 1)
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"
    assert server.sql("SELECT version, serves FROM leaselib.schema_version", database=database) == [(2, [1, 2])]


def test_a_newer_schema_is_refused(server: PostgresServer, database: str, url: str) -> None:
    """With both versions in the message; nothing is written. One that says it serves this library is used."""
    PostgresStore(url).create_schema()
    server.sql("UPDATE leaselib.schema_version SET version = 99", database=database)
    store = PostgresStore(url)
    for call in (store.create_schema, store.now, lambda: store.purge("job"), lambda: store.runs("job")):
        with pytest.raises(StoreError, match=f"version 99.*up to {VERSION}") as caught:
            call()  # type: ignore[operator]
        assert not caught.value.transient
    assert server.sql("SELECT version FROM leaselib.schema_version", database=database) == [(99,)]
    server.sql("UPDATE leaselib.schema_version SET serves = '{2,98,99}'", database=database)
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"


def test_an_unfinished_migration_leaves_nothing(server: PostgresServer, database: str, url: str) -> None:
    """All of it is one transaction: a statement that fails in the middle undoes those before."""
    store = PostgresStore(url)
    broken = migrations("leaselib").replace('CREATE OR REPLACE FUNCTION "leaselib".purge_1', "CREATE NONSENSE")
    with (
        pytest.raises(Exception, match="NONSENSE"),
        store._pool.connection(Deadline(10), urgent=True) as connection,
    ):
        connection.script(broken.encode(), Deadline(10))
    assert server.sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'leaselib'", database=database) == [(0,)]
    store.create_schema()


def test_a_schema_that_is_dropped_comes_again_as_another_epoch(server: PostgresServer, database: str, url: str) -> None:
    """The operation that finds it gone says so; the next one creates it."""
    store = PostgresStore(url)
    before = store.ping().epoch
    server.sql("DROP SCHEMA leaselib CASCADE", database=database)
    with pytest.raises(StoreError, match="leaselib schema postgresql://") as caught:
        store.ping()
    assert not caught.value.transient
    assert store.ping().epoch != before


# ---- rights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def roles(server: PostgresServer, database: str) -> Iterator[tuple[str, str]]:
    """An application's role and one that only looks, without any right of their own."""
    names = (f"app_{database}", f"look_{database}")
    server.sql(
        f"REVOKE ALL ON DATABASE {database} FROM PUBLIC",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        *(f"CREATE ROLE {name} LOGIN" for name in names),
        f"GRANT CONNECT ON DATABASE {database} TO {', '.join(names)}",
        database=database,
    )
    yield names
    for name in names:
        server.sql(f"DROP OWNED BY {name}", f"DROP ROLE {name}", database=database)


def test_a_role_with_only_the_grants_does_everything_but_create(
    server: PostgresServer, database: str, roles: tuple[str, str]
) -> None:
    """Also what an upgrade adds after they were granted; and no more: it alters and drops nothing."""
    app = roles[0]
    with server.admin(database) as connection:
        connection.execute(migrations("leaselib", to=1).encode())
        connection.execute(grants_sql("leaselib", app).encode())
        connection.execute(schema_sql("leaselib").encode())
    url = server.url(app, database)
    store = PostgresStore(url)
    slot = store.now().replace(microsecond=0)
    assert store.claim("job", slot, "t1", "r").outcome == "won"
    assert store.heartbeat("job", slot, "t1", 30, "1")
    with psycopg.connect(url) as own:
        assert store.confirm(own, "job", slot, "t1")
    assert store.release("job", slot, "t1")
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "won"
    with psycopg.connect(url) as own:
        assert store.finish_inside(own, "job", slot, "t2")
    assert [run.status for run in store.runs("job")] == ["success"]
    assert (store.unfinished(["job"]), store.jobs(), store.purge("job")) == ([], ["job"], 1)
    for statement in ("DROP TABLE leaselib.runs", "CREATE TABLE leaselib.x ()", "ALTER TABLE leaselib.runs ADD x int"):
        with psycopg.connect(url) as own, pytest.raises(psycopg.errors.InsufficientPrivilege):
            own.execute(statement.encode())


def test_a_role_that_only_looks_can_look(server: PostgresServer, database: str, roles: tuple[str, str]) -> None:
    """`read_only` grants: reading works, writing is a permanent StoreError that names the grants."""
    owner = PostgresStore(server.url(database=database))
    slot = owner.now().replace(microsecond=0)
    owner.claim("job", slot, "t", "r")
    with server.admin(database) as connection:
        connection.execute(grants_sql("leaselib", roles[1], read_only=True).encode())
    store = PostgresStore(server.url(roles[1], database))
    assert (len(store.runs("job")), store.jobs(), store.ping().epoch) == (1, ["job"], owner.ping().epoch)
    assert len(store.unfinished(["job"])) == 1
    with pytest.raises(StoreError, match=r"permission denied.*leaselib schema URL") as caught:
        store.heartbeat("job", slot, "t", 30)
    assert not caught.value.transient
    assert store.get("job", slot) == owner.get("job", slot)


@pytest.mark.parametrize("create_option", ["true", "false"])
def test_without_the_right_to_create_the_error_names_the_command(
    server: PostgresServer, database: str, roles: tuple[str, str], create_option: str
) -> None:
    """Whether it was forbidden here or there. It is permanent, and over once the administrator has done it."""
    store = PostgresStore.from_url(server.url(roles[0], database, create=create_option))
    command = f"leaselib schema postgresql://{roles[0]}@127.0.0.1:{server.port}/{database}"
    for _ in range(2):
        with pytest.raises(StoreError, match=command) as caught:
            store.now()
        assert not caught.value.transient
    with server.admin(database) as connection:
        connection.execute(schema_sql("leaselib").encode())
        with pytest.raises(StoreError, match="Grant the role"):
            store.now()
        connection.execute(grants_sql("leaselib", roles[0]).encode())
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"


def test_an_older_schema_that_may_not_be_upgraded_is_refused(server: PostgresServer, database: str, url: str) -> None:
    """The error tells the version that is there and the one that is needed."""
    migrate(PostgresStore(url), 0, 1)
    with pytest.raises(StoreError, match=r"at version 2 .* it has version 1, .*create=False"):
        PostgresStore(url, create=False).now()


@pytest.mark.parametrize("place", ["leaselib", "public"])
def test_the_public_may_execute_no_function_and_read_no_table(
    server: PostgresServer, database: str, url: str, place: str
) -> None:
    """Whatever a version adds; also in a schema that everybody may use."""
    PostgresStore(url, schema=place).create_schema()
    where = f"= '{place}'::regnamespace"
    functions = server.sql(
        f"SELECT proname, has_function_privilege('public', oid, 'EXECUTE') FROM pg_proc WHERE pronamespace {where}",
        database=database,
    )
    tables = server.sql(
        f"SELECT relname, has_table_privilege('public', oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES') "
        f"OR has_any_column_privilege('public', oid, 'SELECT, INSERT, UPDATE, REFERENCES') "
        f"FROM pg_class WHERE relkind IN ('r', 'v', 'm', 'S', 'p') AND relnamespace {where}",
        database=database,
    )
    assert (len(functions) >= 14, len(tables) >= 4) == (True, True)
    assert [name for name, allowed in functions + tables if allowed] == []
    server.sql(f"GRANT EXECUTE ON FUNCTION {place}.jobs_1(text) TO PUBLIC", database=database)
    asked = f"SELECT has_function_privilege('public', '{place}.jobs_1(text)', 'EXECUTE')"
    assert server.sql(asked, database=database) == [(True,)], "the question can be answered with yes"


def test_names_of_schemas_and_roles_are_checked_and_quoted() -> None:
    """No name gets out of its quotes."""
    for name in ("", "a b", 'a"b', "pg_mine", "x" * 64, "1a", "a;b", "$leaselib$", "é"):
        with pytest.raises(ConfigurationError, match="schema"):
            schema_sql(name)
    assert quoted('we"ird') == '"we""ird"'
    assert 'TO "we""ird";' in grants_sql("leaselib", 'we"ird')
    assert '"Lease-2"' in schema_sql("Lease-2")
