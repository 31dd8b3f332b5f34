"""The fixture of the contract suite: a bench around the store under test."""

from __future__ import annotations

import pytest
from bench import Bench
from fix_stores import StoreUnderTest


@pytest.fixture
def bench(sut: StoreUnderTest) -> Bench:
    """Short ways to do to a store what an instance does."""
    return Bench(sut)
