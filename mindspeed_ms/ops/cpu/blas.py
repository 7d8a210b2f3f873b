"""Address of SciPy's BLAS, limited to the calling thread, since `threads` spreads kernels over cores."""

import ctypes
import functools
import pathlib

from numba.extending import get_cython_function_address

from mindspeed_ms.core.logging import logger

_SET_THREADS = (
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)


@functools.cache
def sgemm_address():
    """Address of the single-threaded float32 matrix product for `kernels.blas`."""
    address = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    if not any(_set_one_thread(path) for path in _loaded_libraries()):
        logger.debug("SciPy's BLAS has no switch for its threads: products may run more threads than asked for.")
    return address


def _loaded_libraries():
    """BLAS libraries in this process without numpy's own copy, which is left as it is."""
    maps = pathlib.Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[5] for line in lines if "blas" in line or "mkl_rt" in line}
    return sorted(path for path in paths if ".so" in path and "numpy.libs" not in path)


def _set_one_thread(path):
    library = ctypes.CDLL(path)
    for name in _SET_THREADS:
        if hasattr(library, name):
            getattr(library, name)(1)
            return True
    return False
