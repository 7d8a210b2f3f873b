"""Ascend forms of the operators: documented MindSpore operators, differentiated by MindSpore. The tests run none on hardware.

`tests/ascend` runs each form against stand-ins that check every call against the installed operator's signature and the
dtypes, shapes and layouts of its documentation. Operators are looked up at the call (`mint.matmul`), never copied into
names.
"""
