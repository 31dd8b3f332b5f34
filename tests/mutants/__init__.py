"""Mutants of the product: patches that each break one fact of leaselib, and the test that must notice.

Every `<number>-<fact>.patch` beside this file begins with two comment lines: the pytest selection that must fail, and
what is broken. `python -m tests.mutants --help`, from the project's root, runs them; `mutant_patches` reads and applies
them. Where the mutants of `tests/model` replace functions of the pure rules in memory, these change the files that are
shipped: Python, Lua and SQL.
"""
