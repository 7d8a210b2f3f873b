"""Device of this process: choice of CPU or Ascend, start-up, threads, dtypes.

Everything here happens once per process, before the first operator. CPU needs synchronous PyNative: the asynchronous
pipeline hands work between spinning threads, which costs 20 to 60 times the operator itself on small machines and races
with zero-copy writes.
"""

import logging
import os
from contextlib import contextmanager

import mindspore as ms
from mindspore.common import dtype as mstype

from mindspeed_ms.core.autograd import enable_tape
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.machine import cards

DEVICE_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_DEVICE"
THREADS_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_THREADS"
DEVICE_TARGETS = ("CPU", "Ascend")

_DTYPES = {
    "float32": mstype.float32,
    "float16": mstype.float16,
    "bfloat16": mstype.bfloat16,
    "float64": mstype.float64,
    "int8": mstype.int8,
    "uint8": mstype.uint8,
    "int16": mstype.int16,
    "int32": mstype.int32,
    "int64": mstype.int64,
    "bool": mstype.bool_,
}
_DTYPE_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "bool_": "bool",
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DTYPE_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}


class DeviceError(RuntimeError):
    """Error: this process cannot use the requested device."""


_requested_target = None
_initialized_target = None


def request_device(target):
    """Request a device before start-up (`--device`, training_config.device_target); None requests none.

    Raises:
        DeviceError: MINDSPEED_MS_DEVICE names the other one, or this process already works on it.
    """
    global _requested_target
    if target is None:
        require_device(_forced_target())
        return
    forced = _forced_target()
    if forced not in (None, target):
        raise DeviceError(
            f"device_target (--device) is {target!r}, but {DEVICE_ENVIRONMENT_VARIABLE} is {forced!r}: remove one of them."
        )
    if _initialized_target not in (None, target):
        raise DeviceError(
            f"device_target (--device) is {target!r}, but this process already works on "
            f"{_initialized_target!r}: call request_device before set_parallel_context, or set "
            f"{DEVICE_ENVIRONMENT_VARIABLE}."
        )
    require_device(target)
    _requested_target = target


def require_device(target):
    """Raise an error if a device (None: any) is not there.

    Raises:
        DeviceError: it names what was looked for.
    """
    if target == "Ascend" and not _has_ascend():
        reason = "MindSpore does not find its driver" if cards() else "there is no /dev/davinci* on this machine"
        raise DeviceError(
            f"no Ascend was found: {reason}. Use --device CPU ({DEVICE_ENVIRONMENT_VARIABLE}=CPU), or leave the device out."
        )


def device_target():
    """Return "CPU" or "Ascend": MINDSPEED_MS_DEVICE, else the requested device, else Ascend where this machine has one.

    Raises:
        ValueError: the variable names another device.
    """
    if _initialized_target is not None:
        return _initialized_target
    return _forced_target() or _requested_target or ("Ascend" if _has_ascend() else "CPU")


def has_own_kernels():
    """Whether profiles record the device's kernels apart from the framework's operators (Ascend)."""
    return device_target() == "Ascend"


def _forced_target():
    forced = os.environ.get(DEVICE_ENVIRONMENT_VARIABLE)
    if not forced:
        return None
    for target in DEVICE_TARGETS:
        if forced.lower() == target.lower():
            return target
    raise ValueError(f"{DEVICE_ENVIRONMENT_VARIABLE} is {forced!r}: expected one of {', '.join(DEVICE_TARGETS)}.")


def _has_ascend():
    if not cards():
        return False
    try:
        return bool(ms.hal.is_available("Ascend"))
    except (RuntimeError, ValueError, AttributeError):
        return False


def cards_to_use():
    """Number of cards of this machine, one for each rank; None on CPU, where ranks need none."""
    return cards() if device_target() == "Ascend" else None


def thread_count():
    """Compute threads for this process: MINDSPEED_MS_THREADS, else its share of the cores of this machine."""
    text = os.environ.get(THREADS_ENVIRONMENT_VARIABLE)
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"{THREADS_ENVIRONMENT_VARIABLE} is {text!r}: expected a positive integer.")
        return int(text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, launch_environment().local_world_size))


def initialize_device():
    """Choose the device, PyNative mode and threads, and switch the tape on. Safe to call again; returns the target.

    Call it before the first operator and, on CPU with the MCCL backend, before `mindspore.communication.init`.
    """
    global _initialized_target
    if _initialized_target is not None:
        return _initialized_target
    target = device_target()
    require_device(target)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    _set_device(target)
    if target == "CPU":
        with _quiet_mindspore():
            ms.set_context(pynative_synchronize=True)
            # MindSpore's kernels search for the best number of threads during their first calls, so the order of their
            # sums, and with it the last bits, would change while they run; the kernels of ops/ have their own threads
            ms.device_context.cpu.op_tuning.threads_num(1)
    enable_tape()
    _initialized_target = target
    return target


def _set_device(target):
    device_id = launch_environment().local_rank if target == "Ascend" else None
    try:
        if device_id is None:
            ms.set_device(target)
        else:
            ms.set_device(target, device_id)
    except RuntimeError as error:
        # a user's own set_context/set_device came first: fine if it chose the same device
        if ms.get_context("device_target") != target:
            raise RuntimeError(
                f"the device was already set to {ms.get_context('device_target')!r}, but this run needs "
                f"{target!r}: remove the earlier set_context/set_device call or set "
                f"{DEVICE_ENVIRONMENT_VARIABLE}."
            ) from error


@contextmanager
def _quiet_mindspore():
    """Suppress the deprecation warning of the synchronous option, which works, at every start."""
    mindspore_logger = ms.log._get_logger()
    mindspore_logger.addFilter(_below_error)
    try:
        yield
    finally:
        mindspore_logger.removeFilter(_below_error)


def _below_error(record):
    return record.levelno >= logging.ERROR


def to_dtype(dtype):
    """MindSpore dtype of a name ("bfloat16", "bf16", ...) or of a MindSpore dtype.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").removeprefix("mindspore.").lower()
        name = _DTYPE_ALIASES.get(name, name)
        if name not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown: expected one of {', '.join(sorted(_DTYPES))}.")
        return _DTYPES[name]
    if dtype in _DTYPE_NAMES:
        return dtype
    raise ValueError(f"dtype {dtype!r} is unknown: expected one of {', '.join(sorted(_DTYPES))}.")


def dtype_name(dtype):
    """Name ("float32", ...) of a MindSpore dtype, a name or an alias."""
    return _DTYPE_NAMES[to_dtype(dtype)]


def dtype_size(dtype):
    """Bytes of one element of a dtype."""
    return _DTYPE_SIZES[dtype_name(dtype)]
