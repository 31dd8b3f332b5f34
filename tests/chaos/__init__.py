"""Chaos on real processes: four instances, five jobs, one store, and a nemesis that draws its faults from a seed.

`plan` draws the faults, `nemesis` carries them out, `drive` ties them together and has the history judged, and `sweep`
loses the answer of each operation once. All of it runs in the test's thread, but for the proxies'
threads and a metronome. The same seed gives the same faults in the same order; what the processes make of them is as
real as the machine. `python -m tests.chaos --help` from the project's root.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
for _folder in (_TESTS, _TESTS / "system"):  # test folders are no packages; their shared modules are found by path
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
