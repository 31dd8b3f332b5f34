"""The ways in which programs hold a transaction with SQLAlchemy. Owns nothing; any thread may use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy
from sqlalchemy.orm import Session


@contextmanager
def transaction(engine: sqlalchemy.Engine, way: str) -> Iterator[sqlalchemy.Connection]:
    """A connection in a transaction that is committed at the end, unless something is raised.

    Args:
        engine: where to connect to.
        way: `engine.begin`, `session` (its own connection), or `connect` (begins with the first statement).
    """
    if way == "engine.begin":
        with engine.begin() as connection:
            yield connection
    elif way == "session":
        with Session(engine) as session:
            yield session.connection()
            session.commit()
    else:
        with engine.connect() as connection:
            yield connection
            connection.commit()
