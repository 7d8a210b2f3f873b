"""Operators and their forms: `operator` declares one, the device chooses whether its CPU or its Ascend form runs.

A new operator is a declaration in `ops/interface/TOPIC.py` and a function of the same name and signature in
`ops/cpu/TOPIC.py` and in `ops/ascend/TOPIC.py`. Device code is imported at the first call, so `mindspeed_ms.ops` is quick to
import.
"""

import functools
import importlib

from mindspeed_ms.core.device import device_target

FORM_NAMES = ("cpu", "ascend")

DECLARED = {}
"""Operator's name -> its declaration."""
_forms = {}


def operator(declaration):
    """Decorator: declare an operator; a call runs the function of its name in the device's forms. The body is a docstring."""
    name = declaration.__name__
    DECLARED[name] = declaration

    @functools.wraps(declaration)
    def call(*args, **kwargs):
        return (_forms or current_forms())[name](*args, **kwargs)

    return call


def use_forms(name):
    """Run the operators in the forms `name`, "cpu" or "ascend", for tests; normally the device decides.

    Raises:
        ValueError: another name.
        AttributeError: an operator has no such form.
    """
    if name not in FORM_NAMES:
        raise ValueError(f"ops.use_forms got {name!r}: expected one of {', '.join(FORM_NAMES)}.")
    found = {}
    for operator_name, declaration in DECLARED.items():
        topic = declaration.__module__.rpartition(".")[2]
        found[operator_name] = getattr(importlib.import_module(f"mindspeed_ms.ops.{name}.{topic}"), operator_name)
    _forms.update(found)


def current_forms():
    """Forms in use, `{operator's name: function}`; a replaced entry is called instead."""
    if not _forms:
        use_forms(device_target().lower())
    return _forms
