"""Reads and applies the patches of this folder. Used by its command and by `tests/unit/test_mutants_apply.py`.

Runs in the caller's thread and owns nothing. The text of a hunk says where it goes, not its line numbers: what it
expects must be in the file exactly once, so that a patch goes on applying while the file around it changes, and never
lands on another place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
KILLED_BY = "# killed by: "


class BadPatchError(Exception):
    """A patch that can't be read, or doesn't apply to the files as they are."""


@dataclass(frozen=True)
class Hunk:
    """One change: lines of a file as they are, and as they become, with the same context around both."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """A patch. killed_by: the arguments that make pytest run the test which must fail. breaks: what is wrong then."""

    name: str
    killed_by: tuple[str, ...]
    breaks: str
    hunks: tuple[Hunk, ...]

    def mutated(self, root: Path) -> dict[str, str]:
        """The files that the patch changes, as they become, by their path below `root`.

        Raises:
            BadPatchError: a file is missing, or what a hunk expects isn't there exactly once.
        """
        texts: dict[str, str] = {}
        for hunk in self.hunks:
            path = root / hunk.file
            if hunk.file not in texts:
                if not path.is_file():
                    raise BadPatchError(f"{self.name}: there is no file {hunk.file}: make the patch anew, or remove it")
                texts[hunk.file] = path.read_text(encoding="utf-8")
            # With a line end in front, a match begins where a line does.
            text, before, after = (f"\n{part}" for part in (texts[hunk.file], hunk.before, hunk.after))
            found = sum(text.startswith(before, at) for at in range(len(text)))  # overlapping ones too
            if found != 1:
                raise BadPatchError(
                    f"{self.name}: these lines are {found} times in {hunk.file}, not once; make the patch anew for the "
                    f"file as it is now:{before.rstrip()}"
                )
            texts[hunk.file] = text.replace(before, after)[1:]
        return texts


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Every mutant, by name."""
    return [read(path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.patch"))]


def read(name: str, text: str) -> Mutant:
    """A mutant from the text of its patch.

    Raises:
        BadPatchError: the first two lines are not the comments that they should be, or the rest is no unified diff.
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) < 2 or not lines[0].startswith(f"{KILLED_BY}tests/") or not lines[1].startswith("# "):
        raise BadPatchError(f"{name}: must begin with '{KILLED_BY}tests/...' and '# ' with what it breaks")
    hunks = _hunks(name, lines[2:])
    if not hunks or any(hunk.before == hunk.after for hunk in hunks):
        raise BadPatchError(f"{name}: changes nothing; expected a unified diff")
    return Mutant(name, tuple(lines[0][len(KILLED_BY) :].split()), lines[1][2:], tuple(hunks))


def _hunks(name: str, lines: list[str]) -> list[Hunk]:
    found: list[Hunk] = []
    file = ""
    for line in lines:
        if line.startswith("--- "):
            file = ""
        elif line.startswith("+++ b/leaselib/"):
            file = line[len("+++ b/") :]
        elif line.startswith("@@ ") and file:
            found.append(Hunk(file, "", ""))
        elif found and file and line[:1] in ("", " ", "-", "+"):  # an editor may have taken the blank of an empty line
            hunk, mark, rest = found.pop(), line[:1], f"{line[1:]}\n"
            before = hunk.before if mark == "+" else hunk.before + rest
            after = hunk.after if mark == "-" else hunk.after + rest
            found.append(Hunk(file, before, after))
        else:
            raise BadPatchError(f"{name}: {line!r} is no line of a unified diff of files of leaselib")
    return found
