"""Whole clusters in one thread on virtual time: the decision objects of real instances, a store that is the pure rules.

`plan` draws from a seed what a history is made of, `cluster` carries it out, `checks` has it judged, `runner` runs many
of them and shrinks those that fail. Nothing here starts a thread, sleeps, or reads a clock but to measure itself; the
same seed gives the same history, to the byte. `python -m tests.simulation --help` from the project's root.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
for _folder in (_TESTS, _TESTS / "unit"):  # test folders are no packages; what they share is found by path
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
