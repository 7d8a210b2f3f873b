"""Test machinery: forked worlds, self-tests of the tape and of the collectives, what tests and benchmarks share.

Nothing else in the package imports this.
"""
