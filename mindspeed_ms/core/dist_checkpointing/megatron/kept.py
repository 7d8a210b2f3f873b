"""What a Megatron checkpoint holds beside tensors, in plain form for a manifest (`Manifest.foreign["megatron"]`), and back."""

import argparse

import numpy as np

from mindspeed_ms.core.dist_checkpointing.megatron.optimizer import scalar
from mindspeed_ms.core.dist_checkpointing.torch_file import Global, Opaque, TensorReference

NAME = "megatron"


def keep(tree, found, style, experts):
    """Plain form of what the way back needs.

    Args:
        tree (dict): content of a `model_optim_rng.pt` or `common.pt`.
        found (optimizer.FoundStates): of all files.
        style (str): names in the files.
        experts (str): form of the experts, one of `names.EXPERT_FORMS`.
    """
    namespace = tree.get("args")
    return {
        "args": plain(vars(namespace)) if hasattr(namespace, "__dict__") else None,
        "style": style,
        "experts": experts,
        "checkpoint_version": tree.get("checkpoint_version"),
        "optimizer": found.kind,
        "groups": plain(found.groups),
        "step_in_state": found.step_in_state,
        "step_in_groups": found.step_in_groups,
        "num_floating_point_operations_so_far": plain(tree.get("num_floating_point_operations_so_far", 0)),
    }


def plain(value):
    """JSON form of a tree without tensors; what cannot be kept becomes None."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, TensorReference):
        return scalar(value) if value.numel == 1 else None
    if isinstance(value, Global):
        return {"global": [value.module, value.name]}
    if isinstance(value, Opaque):
        return {"opaque": [value.module, value.name, plain(value.arguments), plain(value.state), value.made_by]}
    for name, kind in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return [plain(item) for item in value] if name == "list" else {name: [plain(item) for item in value]}
    if isinstance(value, argparse.Namespace):
        return {"namespace": plain(vars(value))}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    return None


def restored(value):
    """Inverse of `plain`."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "global":
        return Global(*content)
    if name == "opaque":
        module, kind, arguments, state, made_by = content
        return Opaque(module, kind, restored(arguments), restored(state), made_by)
    if name == "namespace":
        return argparse.Namespace(**restored(content))
    if name == "dict":
        return {restored(key): restored(item) for key, item in content}
    return {"tuple": tuple, "set": set}[name](restored(item) for item in content)
