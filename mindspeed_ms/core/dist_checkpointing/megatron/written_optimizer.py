"""Optimizer state of a Megatron file that is written: indexed by parameter, or in flat buffers; see `optimizer`."""

from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import buffers
from mindspeed_ms.core.dist_checkpointing.megatron.optimizer import HALF
from mindspeed_ms.core.dist_checkpointing.torch_file import Global, TensorToWrite

_STATES = ("exp_avg", "exp_avg_sq")
# settings of a group that no source has kept: Megatron's, then those of torch's AdamW and of FusedAdam
_GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}


@dataclass
class OptimizerWriter:
    """Optimizer trees of all files.

    Attributes:
        reader (CheckpointReader): source.
        values (Callable): `(key, FileParameter) -> function that reads its values` as TensorToWrite takes it.
        arguments (dict): Megatron's `args`.
        kept (dict): of `kept.keep`; {} for a source that is not Megatron's.
        distributed (bool): flat buffers.
    """

    reader: object
    values: object
    arguments: dict
    kept: dict
    distributed: bool

    @property
    def step(self):
        """Adam's step."""
        return self.reader.manifest.states["optimizer"]["step"]

    def _steps_in(self, place):
        """Whether Adam's step is in "state" (beside each parameter) or "groups": as it was kept, else in both."""
        if self.distributed:
            return place == "groups"
        is_known = self.kept.get("optimizer") == "plain" and (self.kept["step_in_state"] or self.kept["step_in_groups"])
        return self.kept[f"step_in_{place}"] if is_known else True

    def tree(self, parameters, with_expert_list):
        """`optimizer` of a `model_optim_rng.pt`; of a rank with experts (expert parallelism) a list: dense ones, experts."""
        trained = [one for one in parameters if one.description.trainable]
        if not with_expert_list:
            return self._one(trained, False)
        shares = [[one for one in trained if one.is_expert == is_expert] for is_expert in (False, True)]
        return [self._one(share, is_expert) for share, is_expert in zip(shares, (False, True))]

    def common_tree(self, parameters, with_expert_list):
        """`optimizer` of a `common.pt`: settings of all groups, and Adam's step; by number with expert parallelism."""
        trained = [one for one in parameters if one.description.trainable]
        if not with_expert_list:
            return self._common(trained, False)
        shares = [[one for one in trained if one.is_expert == is_expert] for is_expert in (False, True)]
        return {number: self._common(share, bool(number)) for number, share in enumerate(shares)}

    def _common(self, parameters, is_expert):
        groups = [self._group(decays, is_expert) for decays in dict.fromkeys(one.description.decay for one in parameters)]
        inner = {"param_groups": groups}
        if not self.distributed and self._steps_in("state"):
            inner = {"state": {"common_step": TensorToWrite("float32", (), np.array(self.step, np.float32))}, **inner}
        if not self.distributed and not any(self._dtype(one) in HALF for one in parameters):
            return inner
        kind = {"param_state_sharding_type": "fully_sharded_model_space"} if self.distributed else {}
        return {"optimizer": inner, **self._grad_scaler(), **kind}

    def states_of(self, parameter, with_all_masters):
        """(Megatron's name, our key) of each state of a parameter.

        Args:
            with_all_masters (bool): float32 weights are their own masters, which the distributed optimizer saves again.
        """
        key = parameter.key
        pairs = [(name, optimizer_key(name, key)) for name in _STATES]
        if self._dtype(parameter) in HALF:
            pairs.append(("fp32_param", optimizer_key("fp32_param", key)))
        elif with_all_masters:
            pairs.append(("fp32_param", key))
        return pairs

    def _grad_scaler(self):
        scaler = self.reader.manifest.states["optimizer"].get("grad_scaler")
        if not scaler:
            return {}
        scale = np.array([scaler["scale"]], np.float32)
        return {"grad_scaler": {**scaler, "scale": TensorToWrite("float32", (1,), scale)}}

    def _one(self, parameters, is_expert):
        by_decay = {}
        for parameter in parameters:
            by_decay.setdefault(parameter.description.decay, []).append(parameter)
        groups, state, masters, index = [], {}, [], 0
        for decays, members in by_decay.items():
            group = self._group(decays, is_expert)
            if not self.distributed:
                group["params"] = list(range(index, index + len(members)))
                for parameter in members:
                    state[index] = self._state(parameter)
                    index += 1
                masters.append([self._tensor("fp32_param", one) for one in members if self._dtype(one) in HALF])
            groups.append(group)
        inner = {"param_groups": groups} if self.distributed else {"state": state, "param_groups": groups}
        is_half = any(self._dtype(one) in HALF for one in parameters)
        if not self.distributed and not is_half:
            return inner
        result = {"optimizer": inner, **self._grad_scaler()}
        if not self.distributed:
            result["fp32_from_fp16_params"] = masters
        return result

    def _group(self, decays, is_expert):
        found = [group for group in self.kept.get("groups", ()) if (group.get("wd_mult", 1.0) != 0.0) == decays]
        found = [group for group in found if bool(group.get("is_expert_parallel")) == is_expert] or found
        if found:
            group = dict(found[0])
            if "is_expert_parallel" in group:
                group["is_expert_parallel"] = is_expert
        else:
            schedule = self.reader.manifest.states.get("opt_param_scheduler") or {}
            rate, decay = schedule.get("max_lr", 0.0), schedule.get("end_wd", 0.0)
            group = {
                "wd_mult": 1.0 if decays else 0.0,
                **_GROUP,
                "is_expert_parallel": is_expert,
                "max_lr": rate,
                "min_lr": schedule.get("min_lr", 0.0),
                "lr": rate,
                "betas": (self.arguments.get("adam_beta1") or 0.9, self.arguments.get("adam_beta2") or 0.999),
                "eps": self.arguments.get("adam_eps") or 1e-8,
                "weight_decay": decay if decays else 0.0,
                **_ADAMW,
            }
        if self._steps_in("groups"):
            # torch's AdamW counts in floats
            group["step"] = float(self.step) if "foreach" in group else self.step
        return group

    def _state(self, parameter):
        state = {}
        if self._steps_in("state"):
            state["step"] = TensorToWrite("float32", (), np.array(self.step, np.float32))
        return {**state, **{name: self._tensor(name, parameter) for name in _STATES}}

    def _dtype(self, parameter):
        return self.reader.tensor(parameter.key).dtype

    def _tensor(self, state, parameter):
        key = optimizer_key(state, parameter.key)
        stored = self.reader.tensor(key)
        return TensorToWrite(stored.dtype, parameter.file_shape, self.values(key, parameter))

    def flat(self, parameters, at, with_expert_list, has_dense):
        """Content of a `distrib_optim.pt`.

        Args:
            parameters (list[FileParameter]): of the file.
            at (Coordinates): of the rank that writes it.
            with_expert_list (bool): the rank has experts: [dense parameters, experts].
            has_dense (bool): the rank is the first of its data-parallel group.
        """
        trained = [one for one in parameters if one.description.trainable]
        if not with_expert_list:
            return self._buffers(trained, at)
        dense = self._buffers([one for one in trained if not one.is_expert], at) if has_dense else None
        return [dense, self._buffers([one for one in trained if one.is_expert], at)]

    def _buffers(self, parameters, at):
        tree, number = {"buckets_coalesced": True}, 0
        for chunk in dict.fromkeys(one.chunk for one in parameters):
            members = [one for one in parameters if one.chunk == chunk]
            for dtype in dict.fromkeys(map(self._dtype, members)):
                held = [one for one in members if self._dtype(one) == dtype]
                tree[number] = {self._key(dtype): self._buffer(held, dtype, at.pp, chunk)}
                number += 1
        return tree

    def _key(self, dtype):
        reduces_half = dtype in HALF and self.arguments.get("grad_reduce_in_bf16")
        return Global("torch", dtype), Global("torch", dtype if reduces_half else "float32")

    def _buffer(self, members, dtype, stage, chunk):
        sizes = [one.sharding.numel for one in members]
        shared = [index for index, one in enumerate(members) if one.description.shared]
        starts, total = buffers.places(sizes, shared, buffers.bucket_size_of(self.arguments, stage, chunk))
        states = {"param": "fp32_param" if dtype in HALF else None, **{name: name for name in _STATES}}
        entry = {}
        for name, state in states.items():
            keys = [one.key if state is None else optimizer_key(state, one.key) for one in members]
            kinds = {self.reader.tensor(key).dtype for key in keys}
            if len(kinds) != 1:
                raise CheckpointError(f"{self.reader.folder}: {name} of a flat buffer is {' and '.join(sorted(kinds))}.")
            blocks = self._blocks(keys, members, starts, total)
            entry[name] = TensorToWrite(next(iter(kinds)), (total,), blocks)
        return {**entry, "numel_unpadded": total}

    def _blocks(self, keys, members, starts, total):
        """Function that gives an iterator over the bytes of a buffer, one parameter at a time."""
        itemsize = self.reader.tensor(keys[0]).itemsize

        def run():
            position = 0
            for index in sorted(range(len(keys)), key=starts.__getitem__):
                yield bytes((starts[index] - position) * itemsize)
                yield memoryview(self.values(keys[index], members[index])()).cast("B")
                position = starts[index] + members[index].sharding.numel
            yield bytes((total - position) * itemsize)

        return run
