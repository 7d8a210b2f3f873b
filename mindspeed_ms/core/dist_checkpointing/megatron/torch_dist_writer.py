"""Writer of Megatron checkpoints of the format `torch_dist`; see `torch_dist` for the names and `writer` for the rest.

    <folder>/iter_0000010/.metadata, metadata.json   written last
    <folder>/iter_0000010/__R_0.distcp               tensors of one model-parallel rank that no earlier rank has
    <folder>/iter_0000010/common.pt                  args, counters, settings of the optimizer

The distributed optimizer's state is that of Megatron's `fully_sharded_model_space`. Megatron loads it in any layout.
"""

import functools
import itertools
import os
import re
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import files, names, written_arguments
from mindspeed_ms.core.dist_checkpointing.megatron.writer import CHECKPOINT_VERSION, MegatronTarget
from mindspeed_ms.core.dist_checkpointing.reader import numpy_dtype
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorToWrite, write_torch_file
from mindspeed_ms.core.dist_checkpointing.torch_file.distributed_writer import EntryToWrite, write_distributed
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding

_LEGACY = (names.LEGACY, names.OLD_LEGACY)
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.weight([12])")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Box:
    """Box of a stored tensor that one part holds.

    Attributes:
        key (str): name of the stored tensor.
        indices, counts (tuple[int]): place and length on the leading axes (layers, experts).
        offsets, sizes, shape (tuple[int]): place of the box in one layer's (expert's) tensor, and that one's shape.
        ours (str): our key of the weight.
        sharding (ParameterSharding): its values in our tensor.
        transposed (bool): our rows are its columns.
    """

    key: str
    indices: tuple
    counts: tuple
    offsets: tuple
    sizes: tuple
    shape: tuple
    ours: str
    sharding: ParameterSharding
    transposed: bool = False


class TorchDistTarget(MegatronTarget):
    """Plan of a Megatron checkpoint of the format `torch_dist`; see MegatronTarget.

    Raises:
        CheckpointError: legacy names, or places of layers without weights, which Megatron has none of in this format.
    """

    ckpt_format = "torch_dist"

    def __init__(self, reader, config, style=None, distributed=None, with_optimizer=True, experts=None):
        del experts  # they are stored one by one, whatever their form
        if style in _LEGACY:
            raise CheckpointError("legacy models have the format torch only: Megatron refuses torch_dist for them.")
        kept_style = reader.manifest.foreign.get("megatron", {}).get("style")
        style = style or (names.CORE if kept_style in _LEGACY else None)
        super().__init__(reader, config, style, distributed, with_optimizer, names.SEQUENTIAL)
        if config.parallel_config.noop_layers:
            raise CheckpointError("noop_layers: Megatron's format torch_dist has no layers without weights.")
        self.layers, self.expert_count = config.model_config.num_layers, config.moe_config.num_experts
        frequency = self.arguments.get("moe_layer_freq")
        # Megatron stacks layers that are all of one kind, by this option alone
        self.is_stacked = not isinstance(frequency, list) and (frequency or 1) == 1
        # what Megatron asks a checkpoint's args, to know what it can load
        self.arguments.update(no_save_rng=True, ckpt_fully_parallel_save=True)
        self.arguments["no_save_optim"] = None if self.has_optimizer else True

    @functools.cached_property
    def written(self):
        """See MegatronTarget; of copies on several ranks, the first one is written."""
        seen, result = set(), []
        for _, _, parameters in self.ranks:
            kept = [one for one in parameters if (one.key, one.sharding) not in seen]
            seen.update((one.key, one.sharding) for one in kept)
            if kept:
                result.append((f"__{len(result)}_0.distcp", kept))
        return result

    def _write_files(self, folder, threads, workers):
        seen, contents = set(), []
        with_experts = {id(one) for _, _, ones in self.ranks if self.experts_in(ones) for one in ones}
        for _, parameters in self.written:
            entries = {}
            for one in parameters:
                # the optimizers of a rank with experts are numbered
                chained = f"chained_{int(one.is_expert)}." if id(one) in with_experts else ""
                entries.update({(entry.key, entry.offsets): entry for entry in self._entries(one, chained)})
            contents.append([one for place, one in entries.items() if place not in seen])  # extra states repeat
            seen |= set(entries)
        write_distributed(folder, contents, workers)
        write_torch_file(os.path.join(folder, files.COMMON_FILE), self._common())

    def _common(self):
        tree = {
            "args": written_arguments.namespace(self.arguments, 0),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": self.reader.manifest.iteration,
        }
        if self.has_optimizer:
            everything = [one for _, _, parameters in self.ranks for one in parameters]
            tree["optimizer"] = self.optimizer.common_tree(everything, self.experts_in(everything))
        return {**tree, **self._counters()}

    def _entries(self, parameter, chained):
        """EntryToWrite of a parameter, its optimizer states (`chained` before their names), and its module's extra state."""
        states = []
        if self.has_optimizer and parameter.description.trainable:
            states = self.optimizer.states_of(parameter, self.distributed)
        for box in self._boxes(parameter):
            yield self._entry(box.key, box, box.ours, False)
            for name, source in states:
                yield self._entry(f"{chained}{optimizer_key(name, box.key)}", box, source, self.distributed)
        yield from self._extra_states(parameter)

    def _entry(self, key, box, source, is_flat):
        dtype, numel = self.reader.tensor(source).dtype, int(np.prod(box.sizes))
        shape, offsets = (*box.counts, *box.shape), (*box.indices, *box.offsets)
        sizes = (1,) * len(box.indices) + box.sizes
        data = self._reading(source, box, dtype)
        if not is_flat:
            return EntryToWrite(key, TensorToWrite(dtype, sizes, data), offsets, shape)
        # as many boxes along each axis as there are, then the elements of one
        grid = tuple(whole // size for whole, size in zip(shape, sizes))
        place = tuple(start // size for start, size in zip(offsets, sizes))
        value = TensorToWrite(dtype, (1,) * len(shape) + (numel,), data)
        return EntryToWrite(key, value, (*place, 0), (*grid, numel), shape)

    def _reading(self, source, box, dtype):
        def read():
            values = np.empty(box.sharding.numel, numpy_dtype(dtype))
            missing = self.reader.read(source, FlatSlice(box.sharding, 0, box.sharding.numel), values)
            if missing:
                raise CheckpointError(
                    f"{self.reader.folder} stores no elements {missing[0][0]} to {missing[0][1]} of {source}."
                )
            self._progress(values.nbytes)
            return np.ascontiguousarray(values.reshape(box.sizes[::-1]).T) if box.transposed else values

        return read

    def _boxes(self, parameter):
        """Boxes of a parameter: [gate; up] are two, each expert of a layer is one."""
        core = names.core_name_of(parameter.description.local_name, parameter.description.layer)
        if parameter.is_copy:
            core = names.WORDS
        sharding, shape = parameter.sharding, parameter.sharding.global_shape
        grouped = _GROUPED.fullmatch(core)
        if grouped is None:
            expert = _EXPERT.search(parameter.key)
            key, indices, counts = self._place(core, expert and int(expert[1]))
            for axis, start, stop in _ranges(sharding, parameter.description.grouping):
                part = sharding if axis is None else ParameterSharding(shape, axis, ((start, stop),))
                offsets, sizes = _box_of(shape, axis, start, stop)
                yield Box(key, indices, counts, offsets, sizes, shape, parameter.key, part)
            return
        inner = shape[:0:-1]  # [experts, rows, columns] here, a row for each of the columns there
        for expert in range(*(sharding.leading or (0, shape[0]))):
            key, indices, counts = self._place(f"{grouped[1]}.local_experts.{expert}.linear_fc{grouped[2]}.weight", expert)
            for axis, start, stop in _ranges(sharding, parameter.description.grouping, 2):
                part = ParameterSharding(shape, axis, ((start, stop),), (expert, expert + 1))
                offsets, sizes = _box_of(inner, 2 - axis, start, stop)
                yield Box(key, indices, counts, offsets, sizes, inner, parameter.key, part, True)

    def _place(self, core, expert):
        """(name of the stored tensor, indices and lengths of its leading axes) of a core name with the global layer."""
        layer = re.fullmatch(r"(decoder\.layers\.(\d+)|mtp\.layers\.\d+\.transformer_layer)\.(.+)", core)
        if layer is None:
            return core, (), ()
        place, number, inside = layer.groups()
        is_stacked = self.is_stacked and number is not None
        indices, counts = ((int(number),), (self.layers,)) if is_stacked else ((), ())
        if expert is not None:
            inside = f"mlp.experts.experts.{inside.split('.', 4)[-1]}"
            indices, counts = (*indices, expert), (*counts, self.expert_count)
        # Megatron has these names for the local spec too; before experts, only that one joins norm and linear
        has_experts = self.style == names.TRANSFORMER_ENGINE and self.has_experts_in(core, number and int(number))
        inside = names.name_in_style(f"decoder.layers.0.{inside}", names.TRANSFORMER_ENGINE, has_experts).split(".", 3)[3]
        return f"decoder.layers.{inside}" if is_stacked else f"{place}.{inside}", indices, counts

    def _extra_states(self, parameter):
        """The objects that Megatron saves, and asks for, beside each linear; they are empty without FP8."""
        core = names.core_name_of(parameter.description.local_name, parameter.description.layer)
        grouped = _GROUPED.fullmatch(core)
        is_in_layer = parameter.description.layer is not None or names.MTP_LAYER.fullmatch(core)
        if not is_in_layer or not (grouped or names.is_linear(core)):
            return
        expert = _EXPERT.search(parameter.key)
        experts = [expert and int(expert[1])]
        if grouped:
            core = f"{grouped[1]}.local_experts.0.linear_fc{grouped[2]}.weight"
            experts = range(*(parameter.sharding.leading or (0, parameter.sharding.global_shape[0])))
        for number in experts:
            key, indices, counts = self._place(core, number)
            if not indices:
                indices, counts = (0,), (1,)
            place = f"shard_{'.'.join(map(str, indices))}_{'.'.join(map(str, counts))}"
            yield EntryToWrite(f"{key.rpartition('.')[0]}.{names.EXTRA_STATE}/{place}", [None])


def _ranges(sharding, grouping, axis_of_all=0):
    """(axis, start, stop) of each range that a parameter holds; [gate; up] is never one range."""
    axis, ranges = sharding.axis, sharding.ranges
    if grouping == "gate_up" or (axis is None and len(sharding.global_shape) == 3):
        axis = axis_of_all if axis is None else axis
        ranges = ranges or ((0, sharding.global_shape[axis]),)
    if axis is None:
        return [(None, 0, 0)]
    cuts = [0, sharding.global_shape[axis] // 2] if grouping == "gate_up" else []
    result = []
    for start, stop in ranges:
        bounds = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
        result += [(axis, *pair) for pair in itertools.pairwise(bounds)]
    return result


def _box_of(shape, axis, start, stop):
    """(offsets, sizes) of the box `start` to `stop` on an axis."""
    offsets, sizes = [0] * len(shape), list(shape)
    if axis is not None:
        offsets[axis], sizes[axis] = start, stop - start
    return tuple(offsets), tuple(sizes)
