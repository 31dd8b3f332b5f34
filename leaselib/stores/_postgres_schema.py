"""The schema of a PostgresStore: its migrations, and whether a database has what this library needs.

Owns nothing; any thread may call it. The migrations are the files `sql/postgres/NNNN_*.sql`, NNNN being the schema
version that they lead to; a version's files run in the order of their names. Each statement may be run again.
"""

from __future__ import annotations

from importlib import resources

from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _assets
from leaselib.stores._postgres_connection import Connection, Deadline
from leaselib.stores._postgres_errors import NO_SCHEMA, Failure
from leaselib.stores._postgres_url import check_schema

FOLDER = "sql/postgres"
VERSION = 2
"""The schema version that this library needs."""
NO_COLUMN = "42703"
"""Some other program's table schema_version; what creates the schema says so."""
LOCK_TIMEOUT_MS = 3_000
"""How long a migration waits for a table, since whoever comes after it waits too. It is tried again later."""


def quoted(name: str) -> str:
    """A schema's or role's name as an SQL identifier."""
    if "\0" in name or not 1 <= len(name.encode()) <= 63:
        raise ConfigurationError(f"a name in PostgreSQL has 1 to 63 bytes, not {name!r:.100}")
    return '"' + name.replace('"', '""') + '"'


def migrations(schema: str, after: int = 0, to: int = VERSION) -> str:
    """The SQL that leads from one schema version to another."""
    names = sorted(entry.name for entry in resources.files("leaselib.stores").joinpath(FOLDER).iterdir())
    texts = [_assets.load(FOLDER, name) for name in names if name.endswith(".sql") and after < int(name[:4]) <= to]
    literal = "'" + check_schema(schema) + "'"
    return "\n".join(texts).replace("{schema_literal}", literal).replace("{schema}", quoted(schema))


def locked(schema: str, sql: str, wait_ms: int) -> str:
    """Statements that run in one transaction, while no other instance runs any on this schema.

    The lock is the transaction's, not the session's, so that it ends with it behind any pooler. The settings are too.
    """
    key = f"pg_catalog.hashtextextended('leaselib schema {check_schema(schema)}', 0)"
    return (
        # Or a role's own default would have it look at the database as it was before it had the lock.
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;\n"
        "SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);\n"
        f"SELECT pg_catalog.set_config('lock_timeout', '{wait_ms}', true);\n"
        f"SELECT pg_catalog.pg_advisory_xact_lock({key});\n"
        f"SELECT pg_catalog.set_config('lock_timeout', '{min(wait_ms, LOCK_TIMEOUT_MS)}', true);\n"
        # What exists already is the ordinary case for statements that may be run again.
        "SELECT pg_catalog.set_config('client_min_messages', 'warning', true);\n"
        f"{sql}"
    )


def schema_sql(schema: str = "leaselib") -> str:
    """What a database administrator runs, as the owner-to-be of the schema: a first time, and at each upgrade.

    It may be run again at any time, also while instances run.

    Raises:
        ConfigurationError: the schema's name is none that leaselib takes.
    """
    return f"BEGIN;\n{locked(schema, migrations(schema), 60_000)}\nCOMMIT;\n"


def grants_sql(schema: str, role: str, *, read_only: bool = False) -> str:
    """The GRANTs that a role needs to use the schema, and no more; for one that owns it, none is needed.

    Run them as the schema's owner. They cover what later upgrades by the same owner add.

    Args:
        schema: the schema's name.
        role: the application's role; with `read_only` one that only looks (`leaselib status`, `leaselib runs`).
        read_only: grant no more than that.

    Raises:
        ConfigurationError: a name that PostgreSQL doesn't take.
    """
    place, who = quoted(check_schema(schema)), quoted(role)
    rights = "SELECT" if read_only else "SELECT, INSERT, UPDATE, DELETE"
    return (
        f"GRANT USAGE ON SCHEMA {place} TO {who};\n"
        f"GRANT {rights} ON ALL TABLES IN SCHEMA {place} TO {who};\n"
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {place} TO {who};\n"
        f"ALTER DEFAULT PRIVILEGES IN SCHEMA {place} GRANT {rights} ON TABLES TO {who};\n"
        f"ALTER DEFAULT PRIVILEGES IN SCHEMA {place} GRANT EXECUTE ON FUNCTIONS TO {who};\n"
    )


def found_version(connection: Connection, schema: str, deadline: Deadline) -> int:
    """The schema's version if this library may use it; 0 if there is none yet.

    Raises:
        StoreError: it is newer than this library knows, and doesn't serve it; or the database isn't in UTF8.
        Failure: it can't be read.
    """
    asked = "v.version, v.serves::pg_catalog.text, pg_catalog.current_setting('server_encoding')"
    sql = f"SELECT {asked} FROM {quoted(schema)}.schema_version AS v"  # noqa: S608
    try:
        rows = connection.execute(sql.encode(), [], deadline)
    except Failure as failure:
        if failure.sqlstate in NO_SCHEMA or failure.sqlstate == NO_COLUMN:
            return 0
        raise
    if not rows:
        return 0
    if rows[0][2] != b"UTF8":
        raise StoreError(
            f"leaselib needs a database with the encoding UTF8, and the encoding of this one, which has its schema "
            f"{schema!r}, is {(rows[0][2] or b'').decode()}. Use another one: CREATE DATABASE name ENCODING 'UTF8' "
            f"TEMPLATE template0"
        )
    version = int(rows[0][0] or 0)
    serves = {int(part) for part in (rows[0][1] or b"{}").strip(b"{}").split(b",") if part.isdigit()}
    # A newer library's migration lists the older ones that may go on with its schema, beside itself.
    if version > VERSION and not {version, VERSION} <= serves:
        raise StoreError(
            f"the schema {schema!r} has version {version}, and this leaselib knows versions up to {VERSION} only: it "
            f"writes nothing there. Upgrade leaselib, or use another schema (?schema=NAME)"
        )
    return version


def create(connection: Connection, schema: str, version: int, deadline: Deadline, *, to: int = VERSION) -> None:
    """Leads the schema from the version that was found to another, in one round trip and one transaction.

    If another instance did the same meanwhile, its statements find everything as it should be.

    Raises:
        Failure: it was not possible; nothing was changed, or (`unknown`) the server may still be at it.
    """
    wait_ms = max(1, int(deadline.left() * 900))
    connection.script(locked(schema, migrations(schema, version, to), wait_ms).encode(), deadline)
