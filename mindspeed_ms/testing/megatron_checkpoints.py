"""Made-up state of any model as a CheckpointReader, to be written in Megatron's format; trees of `.pt` files as flat dicts."""

import argparse

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, StoredTensor, optimizer_key
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.core.dist_checkpointing.torch_file import Opaque, TensorReference
from mindspeed_ms.layout.parameters import describe_whole_model

SCHEDULE = {
    "max_lr": 0.01,
    "min_lr": 0.0,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 100,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "constant",
    "num_steps": 28,
}


class MadeUpReader(CheckpointReader):
    """Reader of whole arrays in memory.

    Args:
        config (AllConfig): the model.
        dtype (str): of the weights; half-precision ones get float32 masters.
        with_optimizer (bool): with moments, step and schedule.
        iteration (int): of the training.
    """

    def __init__(self, config, dtype="float32", with_optimizer=True, iteration=7):
        random, self.arrays = np.random.RandomState(1), {}
        optimizer = {"step": iteration, "grad_scaler": {}} if with_optimizer else None
        manifest = Manifest(
            iteration,
            states={
                "train_state": {"iteration": iteration, "consumed_train_samples": 28},
                "optimizer": optimizer,
                "opt_param_scheduler": SCHEDULE if with_optimizer else None,
            },
            args=config.to_dict(),
            vocab_size=config.model_config.vocab_size,
        )
        for one in describe_whole_model(describe_model(config)):
            kinds = {one.name: dtype}
            if with_optimizer and one.trainable:
                states = ["exp_avg", "exp_avg_sq", *(["fp32_param"] if dtype != "float32" else [])]
                kinds.update({optimizer_key(state, one.name): "float32" for state in states})
            for key, kind in kinds.items():
                values = random.standard_normal(one.sharding.global_shape).astype(np.float32)
                values = np.abs(values) if "exp_avg_sq" in key else values
                if kind != "float32":
                    values = values.astype(np.float16).view(np.uint16).view(numpy_dtype(kind))
                self.arrays[key] = values
                manifest.tensors[key] = StoredTensor(one.sharding.global_shape, kind, one.grouping)
        super().__init__("made up", manifest)

    def read(self, key, wanted, out, on_part=None):
        """See CheckpointReader."""
        out[...] = wanted.split(self.arrays[key])
        return []


def flat(tree, place=""):
    """Leaves of a tree by their places: pairs (text, value)."""
    if isinstance(tree, argparse.Namespace):
        tree = vars(tree)
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from flat(value, f"{place}/{name}")
    elif isinstance(tree, (list, tuple)) and tree:
        for number, value in enumerate(tree):
            yield from flat(value, f"{place}/{number}")
    else:
        yield place, tree


def same(one, other):
    """Whether two leaves are equal: tensors bit by bit."""
    if isinstance(one, TensorReference) and isinstance(other, TensorReference):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one.read(), other.read())
    if isinstance(one, Opaque):
        return isinstance(other, Opaque) and (one.module, one.name, one.arguments) == (
            other.module,
            other.name,
            other.arguments,
        )
    return type(one) is type(other) and one == other
