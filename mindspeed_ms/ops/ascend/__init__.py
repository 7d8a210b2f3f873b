"""Ascend forms: documented MindSpore operators, differentiated by MindSpore. Not run on hardware by this project's
tests.

`tests/ascend` runs each form against stand-ins that check every call against the installed operator's signature and the
dtypes, shapes and layouts of its documentation. Operators are looked up at the call (`mint.matmul`), never copied into
names.
"""
