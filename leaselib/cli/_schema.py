"""`leaselib schema`: the SQL that a database administrator runs. Owns nothing; the main thread runs it."""

from __future__ import annotations

import argparse

from leaselib.cli import _output
from leaselib.cli._command import Command
from leaselib.cli._place import add_url, url_of
from leaselib.errors import ConfigurationError
from leaselib.stores import open_store

DETAILS = """\
For databases in which the application's own role may not create anything. Nothing is sent to the database: pipe the
output into psql, as the owner-to-be of the schema, a first time and at each upgrade. It may be run again at any time,
also while instances run; then use ?create=0 in the application's URL.

With --grant ROLE the GRANTs follow that the application's role needs; with --read-only those of a role that only looks.

Exit code: 0; 2 if the URL is not PostgreSQL's.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--grant", metavar="ROLE", help="add what this role needs to use the schema")
    parser.add_argument("--read-only", action="store_true", help="with --grant: no more than to look")


def _run(args: argparse.Namespace) -> int:
    url = url_of(args)
    if not url.lower().startswith(("postgresql:", "postgres:")):
        raise ConfigurationError(
            "only PostgreSQL has a schema to create: write postgresql://user@host/database, with ?schema=NAME if it is "
            "not to be leaselib. Other stores need nothing"
        )
    if args.read_only and args.grant is None:
        raise ConfigurationError("--read-only goes with --grant ROLE")
    store = open_store(url)
    from leaselib.stores._postgres import PostgresStore
    from leaselib.stores._postgres_schema import grants_sql, schema_sql

    assert isinstance(store, PostgresStore)
    _output.say(schema_sql(store.schema).rstrip())
    if args.grant is not None:
        _output.say(grants_sql(store.schema, args.grant, read_only=args.read_only).rstrip())
    store.close()
    return _output.FINE


SCHEMA = Command("schema", "the SQL that creates or upgrades a PostgreSQL schema", DETAILS, _add_arguments, _run)
