"""`leaselib schema` prints SQL for a database administrator, and talks to no database."""

from __future__ import annotations

import pytest

from leaselib.cli import main
from leaselib.stores._postgres_schema import VERSION, grants_sql, schema_sql

URL = "postgresql://app:canary-password@nowhere.invalid/db?schema=jobs"


def test_it_prints_one_transaction_up_to_the_newest_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", URL]) == 0
    out = capsys.readouterr().out
    assert out.strip() == schema_sql("jobs").strip()
    assert f"version = {VERSION}" in out
    assert "canary" not in out


@pytest.mark.parametrize("read_only", [False, True])
def test_with_a_role_the_grants_follow(capsys: pytest.CaptureFixture[str], read_only: bool) -> None:
    assert main(["schema", URL, "--grant", "app", *(["--read-only"] if read_only else [])]) == 0
    assert capsys.readouterr().out.endswith(grants_sql("jobs", "app", read_only=read_only))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["sqlite:///x.db"], "postgresql://"), (["redis://h"], "postgresql://"), ([URL, "--read-only"], "--grant ROLE")],
)
def test_what_it_is_not_for_is_wrong_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["schema", *arguments]) == 2
    assert words in capsys.readouterr().err
