"""Compilation of CPU kernels by numba: without the interpreter lock, once per machine and version of the package.

A kernel works on the rows (columns, elements) `start` to `stop` of its arrays; `threads.run` spreads it. All arrays are
float32 unless a kernel says otherwise: half precisions are widened and narrowed outside, so each kernel has one
specialisation. Compilation happens at the first call, never at import, so a process may fork after importing this.
"""

import functools
import hashlib
import pathlib

import numba

from mindspeed_ms.core.compiled import compiled, one_process_compiles
from mindspeed_ms.ops.cpu import jobs

# contract (fused multiply-add) and nsz change no result by more than a rounding; reassociation only where asked for,
# because range reductions and compensated sums depend on their order
_EXACT_FLAGS = frozenset({"contract", "nsz"})
_REDUCTION_FLAGS = _EXACT_FLAGS | {"reassoc"}
_INNER = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # only called by compiled functions


_ENTRY = """def {name}(board, total, piece, {arguments}):
    code, place = share_(({arguments},))
    if run_(board, code, place, total, piece):
        raise RuntimeError("a piece of the kernel {name} failed")
"""


class Kernel:
    """Compiled function of `board, total, piece, ...`: runs a function of `start, stop, ...` on pieces of `total`, see `jobs`.

    The first call compiles, or loads what another rank compiled meanwhile.
    """

    def __init__(self, function):
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self._entry = _cached(_entry_of(function))
        self._is_compiled = False

    def entry(self, *arguments):
        """Run pieces of a job; see the class."""
        if not self._is_compiled:
            with one_process_compiles(_room(), self.__name__):
                self._entry.compile(tuple(numba.typeof(argument) for argument in arguments))
            self._is_compiled = True
        return self._entry(*arguments)


def _entry_of(function):
    """Compilable function that runs a job of `function`, with its file and line, by which numba caches the machine code."""
    code = function.__code__
    arguments = ", ".join(code.co_varnames[2 : code.co_argcount])
    namespace = {"share_": jobs.shared_code(function, {"fastmath": set(_EXACT_FLAGS), **_INNER}), "run_": jobs.run}
    exec(compile(_ENTRY.format(name=function.__name__, arguments=arguments), code.co_filename, "exec"), namespace)
    entry = namespace[function.__name__]
    entry.__code__ = entry.__code__.replace(co_firstlineno=code.co_firstlineno)
    entry.__module__, entry.__qualname__ = function.__module__, function.__qualname__
    return entry


def _cached(function):
    options = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    return compiled(function, _room(), fastmath=set(_EXACT_FLAGS), **options)


@functools.cache
def _room():
    # numba notices changes of a kernel's own file only, not of the helpers that are compiled into it
    digest = hashlib.sha256()
    folder = pathlib.Path(__file__).parent
    for path in [
        *(folder / f"{name}.py" for name in ("jobs", "vectors", "compiler")),
        *sorted((folder / "kernels").glob("*.py")),
    ]:
        digest.update(path.read_bytes())
    return f"kernels-{digest.hexdigest()[:12]}"


def kernel(function):
    """Decorator: make a `Kernel` of a function of `start, stop, arrays and numbers`; results must not depend on the cut."""
    return Kernel(function)


def shared(function):
    """Decorator of a function inside kernels that is not inlined: for rare or long parts, to shorten compilation."""
    return numba.njit(fastmath=set(_EXACT_FLAGS), **_INNER)(function)


def inline(function):
    """Decorator of a function inside kernels that the compiler inlines."""
    return numba.njit(fastmath=set(_EXACT_FLAGS), forceinline=True, **_INNER)(function)


def reduction(function):
    """Decorator like `inline` for sums in any order, so that the compiler makes vector code."""
    return numba.njit(fastmath=set(_REDUCTION_FLAGS), forceinline=True, **_INNER)(function)
