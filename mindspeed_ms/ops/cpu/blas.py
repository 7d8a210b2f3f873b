"""Where SciPy's BLAS is, and that it runs on the calling thread only: kernels are spread by `threads`, not inside
BLAS.
"""
import ctypes
import functools
import logging
import pathlib

import scipy
from numba.extending import get_cython_function_address

logger = logging.getLogger("mindspeed_ms")

_SET_THREADS = ("scipy_openblas_set_num_threads", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads")


@functools.cache
def sgemm_address():
    """Address of the single-threaded float32 matrix product for `kernels.blas`."""
    address = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    _keep_to_one_thread()
    return address


def _keep_to_one_thread():
    folder = pathlib.Path(scipy.__file__).resolve().parent
    for path in [*folder.parent.glob("scipy.libs/*openblas*"), *folder.glob(".libs/*openblas*")]:
        library = ctypes.CDLL(str(path))
        for name in _SET_THREADS:
            if hasattr(library, name):
                getattr(library, name)(1)
                return
    logger.debug("SciPy uses a BLAS whose threads cannot be set here: attention may run more threads than asked for.")
