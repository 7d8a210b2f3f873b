"""Stand-ins for MindSpore's operators that check each call and work on a CPU.

`recording()` puts namespaces in the place of `mint` and `ops` in every module of `mindspeed_ms.ops.ascend`. Each call
must name an operator of the installed MindSpore and bind to its signature; `rules` then checks dtypes, shapes and
layouts as documented, and `stand_ins` replaces what has no CPU kernel. The other operators run as they are.
"""

import contextlib
import importlib
import inspect
import pkgutil

import mindspore as ms

import mindspeed_ms.ops
import mindspeed_ms.ops.ascend
from tests.ascend import rules, stand_ins


class RecordingNamespace:
    """Wraps a module: callables are checked and recorded, modules become namespaces."""

    def __init__(self, module, path, calls):
        self._module, self._path, self._calls = module, path, calls

    def __getattr__(self, name):
        path = f"{self._path}.{name}"
        value = getattr(self._module, name, None)
        if inspect.ismodule(value):
            return RecordingNamespace(value, path, self._calls)
        assert callable(value), f"{path} does not exist in MindSpore {ms.__version__}"
        return RecordingOperator(value, path, self._calls)


class RecordingOperator:
    """Checks and records one operator; an operator class is checked at its construction and at its call."""

    def __init__(self, operator, path, calls):
        self._operator, self._path, self._calls = operator, path, calls

    def __call__(self, *args, **kwargs):
        target = self._operator.__init__ if inspect.isclass(self._operator) else self._operator
        bound = _bind(target, inspect.isclass(self._operator), self._path, args, kwargs)
        if inspect.isclass(self._operator):
            return RecordingPrimitive(self._operator, bound, self._path, self._calls)
        self._calls.append((self._path, bound))
        rules.check(self._path, bound)
        stand_in = stand_ins.COMPUTED.get(self._path) or stand_ins.SHAPED.get(self._path) or self._operator
        return stand_in(*args, **kwargs)


class RecordingPrimitive:
    """An operator object whose attributes are bound already."""

    def __init__(self, operator, attributes, path, calls):
        self._operator, self._attributes, self._path, self._calls = operator, attributes, path, calls

    def __call__(self, *args, **kwargs):
        bound = {**self._attributes, **_bind(self._operator.__call__, True, self._path, args, kwargs)}
        self._calls.append((self._path, bound))
        rules.check(self._path, bound)
        return stand_ins.SHAPED[self._path](**bound)


def _bind(function, is_method, path, args, kwargs):
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*([None] if is_method else []), *args, **kwargs)
    except TypeError as error:
        raise AssertionError(f"{path}: the call does not fit {inspect.signature(function)}: {error}") from error
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _form_modules():
    package = mindspeed_ms.ops.ascend
    return [importlib.import_module(f"{package.__name__}.{entry.name}") for entry in pkgutil.iter_modules(package.__path__)]


@contextlib.contextmanager
def recording():
    """Use the Ascend forms on the stand-ins; yields the list of (operator, arguments) calls."""
    calls = []
    replaced = []
    for module in _form_modules():
        for name, real in (("mint", ms.mint), ("ops", ms.ops)):
            if getattr(module, name, None) is real:
                replaced.append((module, name, real))
                setattr(module, name, RecordingNamespace(real, name, calls))
    mindspeed_ms.ops.use_forms("ascend")
    try:
        yield calls
    finally:
        for module, name, real in replaced:
            setattr(module, name, real)
        mindspeed_ms.ops.use_forms("cpu")
