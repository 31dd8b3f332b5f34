"""`python -m leaselib`: the command line. Owns nothing; the main thread runs it."""

from __future__ import annotations

import sys

from leaselib.cli import main

if __name__ == "__main__":
    sys.exit(main())
