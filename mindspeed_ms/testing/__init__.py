"""Test machinery: forked worlds, self-tests of the tape and the collectives, code shared by tests and benchmarks.

Nothing else in the package imports this.
"""
