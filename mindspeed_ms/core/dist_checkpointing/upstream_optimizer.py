"""Optimizer state in checkpoint files that upstream (mindspeed_ms r0.1.0) wrote without a distributed optimizer.

Beside the weight NAME (of a half-precision run its float32 master) are `exp_avg.NAME` and `exp_avg_sq.NAME`, cut as the
weight is, and scalars: `state_step` (Adam's), `epoch_num` and `step_num` (in the epoch), and the schedule's settings with
`num_steps` (samples). The loss scale and the number of a run's iteration are not there. A distributed optimizer stores its
buffers instead (`exp_avg.buffer_0_bucket_0`), ZeRO parts of tensors: those cannot be distinguished here.
"""

import numpy as np

from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, optimizer_key

MOMENTS = ("exp_avg", "exp_avg_sq")
_NUMBERS = ("lr_warmup_steps", "num_steps", "lr_decay_steps", "wd_incr_steps")
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
# upstream stores the place in these lists
_STYLES = {
    "lr_decay_style": ("constant", "WSD", "linear", "cosine", "inverse-square-root"),
    "wd_incr_style": ("constant", "linear", "cosine"),
}
_MOST_SCALAR_BYTES = 8


def read_scalars(path, tensors):
    """Counters in a rank's file: {name: number}.

    Args:
        path (str): the file.
        tensors (dict[str, FileTensor]): all that it holds.
    """
    names = ("state_step", "epoch_num", "step_num", *_NUMBERS, *_RATES, *_STYLES)
    result = {}
    with open(path, "rb") as file:
        for name in names:
            tensor = tensors.get(name)
            if tensor is None or len(tensor.ranges) != 1 or tensor.dtype in ("bfloat16", None):
                continue
            start, stop = tensor.ranges[0]
            if 0 < stop - start <= _MOST_SCALAR_BYTES:
                file.seek(start)
                result[name] = np.frombuffer(file.read(stop - start), tensor.dtype)[0].item()
    return result


def set_states(manifest, scalars, names):
    """Fill `manifest.states` with counters, schedule and optimizer as far as the files have them.

    Args:
        manifest (Manifest): with the moments that were found; without them if they are not complete.
        scalars (dict): of `read_scalars`.
        names (set[str]): of all tensors in the files.

    Returns:
        str: why the training cannot go on from it; "" if it can.
    """
    train_state = manifest.states["train_state"]
    train_state["step_in_epoch"] = int(scalars.get("step_num", train_state["iteration"]))
    train_state["consumed_train_samples"] = int(scalars.get("num_steps", 0))
    problem = _problem(manifest, scalars, names)
    if problem:
        manifest.tensors = {key: stored for key, stored in manifest.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)}
        return problem
    if train_state["epoch"] or not train_state["iteration"]:
        # how many steps an epoch has is not stored, and a converter's names of files have no step
        manifest.iteration = train_state["iteration"] = int(scalars["state_step"])
    train_state["skipped_iterations"] = max(0, train_state["iteration"] - int(scalars["state_step"]))
    schedule = {
        **{name: int(scalars[name]) for name in _NUMBERS},
        **{name: float(scalars[name]) for name in _RATES},
        **{name: styles[int(scalars[name])] for name, styles in _STYLES.items()},
    }
    manifest.states["optimizer"] = {"step": int(scalars["state_step"]), "grad_scaler": {}}
    manifest.states["opt_param_scheduler"] = schedule
    return ""


def scalars_of(states):
    """Counters to store beside the moments, the inverse of `set_states`: {name: number}; {} if they are not complete.

    Args:
        states (dict): of a manifest.
    """
    step, schedule = (states.get("optimizer") or {}).get("step"), states.get("opt_param_scheduler") or {}
    if step is None or any(schedule.get(name) is None for name in (*_NUMBERS, *_RATES, *_STYLES)):
        return {}
    if any(schedule[name] not in styles for name, styles in _STYLES.items()):
        return {}
    train_state = states.get("train_state") or {}
    return {
        "state_step": int(step),
        "epoch_num": int(train_state.get("epoch", 0)),
        "step_num": int(train_state.get("step_in_epoch", step)),
        **{name: int(schedule[name]) for name in _NUMBERS},
        **{name: float(schedule[name]) for name in _RATES},
        **{name: styles.index(schedule[name]) for name, styles in _STYLES.items()},
    }


def _problem(manifest, scalars, names):
    if any(name.startswith("exp_avg.buffer_") for name in names):
        return "it stands in the buffers of a distributed optimizer"
    weights = [key for key in manifest.tensors if not key.startswith(OPTIMIZER_PREFIX)]
    missing = [f"{state}.{key}" for state in MOMENTS for key in weights if optimizer_key(state, key) not in manifest.tensors]
    if len(missing) == len(MOMENTS) * len(weights):
        return "there is none"
    if missing:
        return f"{missing[0]} is missing, or only a part of it is there, as ZeRO leaves it"
    lost = [name for name in ("state_step", *_NUMBERS, *_RATES, *_STYLES) if name not in scalars]
    if lost:
        return f"{', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''} is not stored"
    wrong = [name for name, styles in _STYLES.items() if not 0 <= scalars[name] < len(styles)]
    return f"{wrong[0]} is {scalars[wrong[0]]}" if wrong else ""


def moments_of(key, tensors, local_shape):
    """Moments of a weight in a rank's file, cut like the weight: (state name, FileTensor)."""
    for state in MOMENTS:
        tensor = tensors.get(f"{state}.{key}")
        if tensor is not None and tensor.shape == tuple(local_shape):
            yield state, tensor
