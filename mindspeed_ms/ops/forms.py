"""Which implementation ("form") of the operators runs: chosen once, from the device, at the first operator.

Device code is imported here and nowhere else in `ops`, so importing `mindspeed_ms.ops` stays cheap.
"""

import importlib

FORM_NAMES = ("cpu", "ascend")

_current = None


def use_forms(name):
    """Run the operators in the forms of `name`: "cpu" or "ascend". For tests; normally the device decides.

    Raises:
        ValueError: another name.
    """
    global _current
    if name not in FORM_NAMES:
        raise ValueError(f"ops.use_forms got {name!r}: expected one of {', '.join(FORM_NAMES)}.")
    _current = importlib.import_module(f"mindspeed_ms.ops.{name}")
    return _current


def current_forms():
    """The module that holds the forms in use."""
    if _current is not None:
        return _current
    from mindspeed_ms.core.device import device_target

    return use_forms(device_target().lower())
