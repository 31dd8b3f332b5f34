"""The patches of `tests/mutants` apply to the project as it is, so that its command tests what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "mutants"))  # a package only where `tests` is found, as from the project's root

from mutant_patches import BadPatchError, Mutant, load, read  # noqa: E402

MUTANTS = load()
TEXT = """\
# killed by: tests/unit/test_x.py::test_y
# One is two.
--- a/leaselib/a.py
+++ b/leaselib/a.py
@@ -1,3 +1,3 @@
 above

-one
+two
"""


def test_there_are_mutants_of_every_language():
    files = [hunk.file for mutant in MUTANTS for hunk in mutant.hunks]
    assert len(MUTANTS) >= 40
    assert [end for end in (".py", ".lua", ".sql") if sum(file.endswith(end) for file in files) < 12] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_a_test_that_exists(mutant: Mutant):
    for file, text in mutant.mutated(ROOT).items():
        if file.endswith(".py"):
            compile(text, file, "exec")
    file, _, test = mutant.killed_by[0].partition("::")
    name = test.partition("[")[0]
    assert name
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_patch_goes_where_its_lines_are_whatever_their_numbers(tmp_path: Path):
    (tmp_path / "leaselib").mkdir()
    (tmp_path / "leaselib" / "a.py").write_text("more\nand more\nabove\n\none\nbelow\n", encoding="utf-8")
    mutant = read("x", TEXT)
    assert (mutant.killed_by, mutant.breaks) == (("tests/unit/test_x.py::test_y",), "One is two.")
    assert mutant.mutated(tmp_path) == {"leaselib/a.py": "more\nand more\nabove\n\ntwo\nbelow\n"}


@pytest.mark.parametrize("content", ["above\n\nanother one\n", "above\n\none\nabove\n\none\n", "far above\n\none\n"])
def test_a_patch_whose_lines_are_not_there_exactly_once_is_refused(tmp_path: Path, content: str):
    (tmp_path / "leaselib").mkdir()
    (tmp_path / "leaselib" / "a.py").write_text(content, encoding="utf-8")
    with pytest.raises(BadPatchError, match=r"are [02] times in leaselib/a\.py, not once"):
        read("x", TEXT).mutated(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("# killed by: tests/", "# killed by: "),
        TEXT.replace("# One is two.\n", ""),
        TEXT.replace("b/leaselib/", "b/tests/"),
        TEXT.replace("+two", "+one"),
        TEXT.partition("---")[0],
    ],
)
def test_what_is_no_such_patch_is_refused(text: str):
    with pytest.raises(BadPatchError):
        read("x", text)
