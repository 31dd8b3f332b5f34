"""The numbers of the rules, which SQL and Lua texts repeat, are those of Python."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from leaselib import _model, _rules
from leaselib.stores import _postgres_rows

STORES = resources.files("leaselib.stores")
RULES = {
    "late_tolerance_ms": _rules.LATE_TOLERANCE_MS,
    "early_ms": _rules.EARLY_MS,
    "trim_margin_ms": _rules.TRIM_MARGIN_MS,
    "trim_batch": _rules.TRIM_BATCH,
    "log_entries": _model.LOG_ENTRIES,
}


def test_the_numbers_of_postgresqls_claim_are_those_of_the_rules() -> None:
    """Each function that has such numbers has all of them; a claim waits half a second for a row, as it says."""
    found = 0
    for entry in STORES.joinpath("sql/postgres").iterdir():
        numbers = re.findall(r"\bc_(\w+) CONSTANT \w+ := (\d+);", entry.read_text(encoding="utf-8"))
        if numbers:
            found += 1
            assert {name: int(number) for name, number in numbers} == {**RULES, "row_wait_ms": 500}, entry.name
    assert found, "no function names its numbers in the form that this test reads"


def lua_numbers(script: str) -> dict[str, int]:
    """The numbers in capitals that a Lua script names at its top."""
    text = STORES.joinpath("lua", script).read_text(encoding="utf-8")
    found: dict[str, int] = {}
    for names, values in re.findall(r"^local ([A-Z_, ]+) = ([-\d, ]+?)(?: *--.*)?$", text, re.MULTILINE):
        pairs = zip(names.split(", "), values.split(", "), strict=True)
        found.update({name: int(value) for name, value in pairs})
    return found


def test_the_numbers_of_redis_claim_are_those_of_the_rules() -> None:
    """Named there without their unit."""
    expected = {name.upper().removesuffix("_MS"): value for name, value in RULES.items() if name != "log_entries"}
    assert lua_numbers("claim.lua") == expected


def test_the_numbers_that_every_lua_script_shares_are_those_of_the_records() -> None:
    """What is stored is judged by the same limits there and here."""
    numbers = lua_numbers("common.lua")
    assert numbers["LOG_ENTRIES"] == _model.LOG_ENTRIES
    assert numbers["LARGEST"] == _postgres_rows.HUGE
    assert (numbers["FIRST_MS"], numbers["LAST_MS"]) == (_postgres_rows._FIRST_MS, _postgres_rows._LAST_MS)


@pytest.mark.parametrize("place", ["sql/postgres/0001_claim.sql", "lua/claim.lua"])
def test_no_number_of_the_rules_stands_there_without_its_name(place: str) -> None:
    """Or it would be none that the other tests see."""
    text = re.sub(r"--.*", "", STORES.joinpath(place).read_text(encoding="utf-8"))
    named = re.sub(r"(?m)^(\s*c_\w+ CONSTANT|local [A-Z_, ]+ =).*$", "", text)
    for name, value in RULES.items():
        if value >= 1000 and not (name == "early_ms" and place.endswith(".sql")):  # seconds to milliseconds
            assert not re.search(rf"\b{value}\b", named), name
