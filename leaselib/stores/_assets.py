"""Texts that are shipped beside the stores (SQL, Lua), each read once, when it is first needed.

Owns the cache of what was read; any thread may call it.
"""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def load(folder: str, name: str) -> str:
    """The text of the file `name` in that folder below leaselib/stores, such as `load("sql/sqlite", "schema.sql")`."""
    return resources.files("leaselib.stores").joinpath(folder).joinpath(name).read_text("utf-8")
