"""Writer of Megatron checkpoints (format `torch`) in any layout, from any CheckpointReader, one tensor at a time.

    <folder>/latest_checkpointed_iteration.txt           written last
    <folder>/iter_0000010/mp_rank_.../model_optim_rng.pt
    <folder>/iter_0000010/mp_rank_.../distrib_optim.pt   with the distributed optimizer

Weights without a training are a `release`. Random states are not written: Megatron loads with --no-load-rng.
"""

import collections
import os
import secrets
import shutil

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.by_tensor import Workers
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, whole_slice
from mindspeed_ms.core.dist_checkpointing.megatron import files, kept, names, written_arguments
from mindspeed_ms.core.dist_checkpointing.megatron.ranks import file_places, parameters_of
from mindspeed_ms.core.dist_checkpointing.megatron.written_optimizer import OptimizerWriter
from mindspeed_ms.core.dist_checkpointing.reader import numpy_dtype
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorToWrite, write_torch_file

CHECKPOINT_VERSION = 3.0


class MegatronTarget:
    """Plan of a Megatron checkpoint.

    Args:
        reader (CheckpointReader): source; its tensors have the shapes of `config`'s model.
        config (AllConfig): model and layout of the target.
        style (Optional[str]): names in the files, one of `names.STYLES`; None: the source's, else core's local spec.
        distributed (Optional[bool]): distributed optimizer; None: as in the source.
        with_optimizer (bool): the optimizer's state goes with the weights, if there is one.
        experts (Optional[str]): form of the experts, which their keys fit; one of `names.EXPERT_FORMS`; None: as in the
            source, else what the keys and the style say.

    Attributes:
        ranks (list[(RankFile place, Coordinates, list[FileParameter])]): the files.

    Raises:
        CheckpointError: parameters that Megatron does not have, or tensors that are missing or left over.
    """

    ckpt_format = "torch"

    def __init__(self, reader, config, style=None, distributed=None, with_optimizer=True, experts=None):
        self.reader, self.model = reader, describe_model(config)
        manifest = reader.manifest
        self.kept = manifest.foreign.get(kept.NAME, {})
        self.style = style or self.kept.get("style") or names.CORE
        self.experts = self._expert_form(experts or self.kept.get("experts"), config)
        self.has_optimizer = with_optimizer and bool(manifest.states.get("optimizer"))
        if distributed is None:
            training = manifest.args.get("training_config") or {}
            distributed = self.kept.get("optimizer", "") == "distributed" or bool(
                not self.kept and training.get("use_distributed_optimizer")
            )
        self.distributed = distributed and self.has_optimizer
        self.arguments = written_arguments.arguments_of(
            manifest, config, self.style, self.distributed, self.ckpt_format, self.experts
        )
        self.ranks = [
            (place, at, parameters_of(self.model, at, self.style, self.experts))
            for place, at in file_places(self.model).items()
        ]
        settings = {**self.kept, "groups": kept.restored(self.kept.get("groups") or [])} if self.kept else {}
        self.optimizer = OptimizerWriter(reader, self._values, self.arguments, settings, self.distributed)
        self._progress = lambda count: None
        self._check()

    def _expert_form(self, wanted, config):
        """Form of the experts, None without any."""
        if config.moe_config.num_experts == 1:
            return None
        if config.moe_config.moe_grouped_gemm:
            return names.GROUPED
        if self.style != names.TRANSFORMER_ENGINE:
            return names.SEQUENTIAL
        return names.SEQUENTIAL if wanted == names.SEQUENTIAL else names.ENGINE_GROUPED

    def _check(self):
        if self.model.mtp_num_layers and self.model.is_tied and self.model.stages.pp > 1:
            raise CheckpointError(
                "mtp_num_layers with tied embeddings on several stages: Megatron's last stage has a head of its own there. "
                "Write one pipeline stage."
            )
        wanted = {one.key: one for _, _, parameters in self.ranks for one in parameters}
        stored = self.reader.manifest.tensors
        weights = {key for key in stored if not key.startswith(OPTIMIZER_PREFIX)}
        problems = {"missing": set(wanted) - weights, "left over": weights - set(wanted)}
        if self.has_optimizer:
            states = {
                key.removeprefix(OPTIMIZER_PREFIX).partition(".")[0] for key in stored if key.startswith(OPTIMIZER_PREFIX)
            }
            if not states <= {"exp_avg", "exp_avg_sq", "fp32_param"}:
                raise CheckpointError(f"{self.reader.folder}: Megatron's Adam has no state {', '.join(sorted(states))}.")
            trained = {key for key, one in wanted.items() if one.description.trainable}
            problems["missing"] |= {
                f"{OPTIMIZER_PREFIX}{state}.{key}"
                for state in ("exp_avg", "exp_avg_sq")
                for key in trained
                if f"{OPTIMIZER_PREFIX}{state}.{key}" not in stored
            }
        if any(problems.values()):
            texts = [
                f"{title}: {', '.join(sorted(found)[:6])}{' ...' if len(found) > 6 else ''}"
                for title, found in problems.items()
                if found
            ]
            raise CheckpointError(f"{self.reader.folder} does not hold the model of the target: {'; '.join(texts)}.")
        for key, one in wanted.items():
            if stored[key].shape != one.sharding.global_shape:
                raise CheckpointError(
                    f"{self.reader.folder}: {key} has shape {list(stored[key].shape)}, expected "
                    f"{list(one.sharding.global_shape)}."
                )

    @property
    def written(self):
        """(name of a file or folder, FileParameters that it gets)."""
        return [(self.folder_of(place), parameters) for place, _, parameters in self.ranks]

    @property
    def iteration(self):
        """Number of the iteration, or `files.RELEASE`."""
        manifest = self.reader.manifest
        is_release = not self.has_optimizer and (not manifest.iteration or manifest.has_only_weights)
        return files.RELEASE if is_release else manifest.iteration

    @property
    def has_experts(self):
        """Whether files are those of expert-parallel ranks."""
        return self.model.parallel.expert_model_parallel_size > 1

    def has_experts_in(self, core, layer):
        """Whether a parameter's layer has experts: the global `layer`, or by its core name one of multi-token prediction."""
        if names.MTP_LAYER.fullmatch(core):
            layer = self.model.stages.num_layers - 1  # which those are like
        return layer is not None and self.model.mlp_kind(layer) == "experts"

    def experts_in(self, parameters):
        """Whether a rank with these parameters has an optimizer of experts."""
        return self.has_experts and any(one.is_expert for one in parameters)

    def folder_of(self, place):
        """Name of a rank's folder."""
        return files.rank_folder(*place, self.model.stages.pp > 1, self.has_experts)

    def nbytes(self):
        """Bytes of all tensors."""
        total = 0
        for _, parameters in self.written:
            for one in parameters:
                total += one.sharding.numel * self.reader.tensor(one.key).itemsize
                if self.has_optimizer and one.description.trainable:
                    total += 4 * one.sharding.numel * (2 if self.reader.tensor(one.key).dtype == "float32" else 3)
        return total

    def write(self, folder, progress=None, workers=1):
        """Write the checkpoint into a folder; it appears complete or not at all.

        Args:
            progress (Optional[Callable]): called with the number of bytes that were read.
            workers (int): threads, each of which writes a rank's file.

        Returns:
            str: the checkpoint's folder.

        Raises:
            CheckpointError: it exists already, or the source cannot be read.
        """
        target = os.path.join(folder, files.folder_name(self.iteration))
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists already: choose a new folder.")
        temporary = f"{target}.{secrets.token_hex(4)}.incomplete"
        os.makedirs(temporary)
        threads = Workers(workers, progress)
        self._progress = threads.advance
        try:
            self._write_files(temporary, threads, workers)
            durable.sync(temporary)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        durable.replace_file(os.path.join(folder, files.TRACKER_FILE), str(self.iteration).encode())
        return target

    def _write_files(self, folder, threads, workers):
        """Write the files (`threads`: Workers, `workers` of them)."""
        del workers
        threads.run(lambda rank: self._write_rank(folder, *rank), self.ranks)

    def _write_rank(self, folder, place, at, parameters):
        path = os.path.join(folder, self.folder_of(place))
        os.makedirs(path)
        write_torch_file(os.path.join(path, files.MODEL_FILE), self._tree(at, parameters))
        has_dense, has_experts = at.dp == 0 and at.cp == 0, self.experts_in(parameters)
        if self.distributed and (has_dense or has_experts):
            tree = self.optimizer.flat(parameters, at, has_experts, has_dense)
            write_torch_file(os.path.join(path, files.OPTIMIZER_FILE), tree)

    def _tree(self, at, parameters):
        manifest = self.reader.manifest
        chunks = range(self.model.stages.vpp)
        tree = {
            "args": written_arguments.namespace(self.arguments, at.rank),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": manifest.iteration,
        }
        for chunk in chunks:
            members = [one for one in parameters if one.chunk == chunk]
            tree["model" if len(chunks) == 1 else f"model{chunk}"] = self._chunk(at, chunk, members)
        if self.has_optimizer:
            tree["optimizer"] = self.optimizer.tree(parameters, self.experts_in(parameters))
        return {**tree, **self._counters()}

    def _counters(self):
        """Last entries of a tree: the schedule and the operations so far."""
        schedule = self.reader.manifest.states.get("opt_param_scheduler")
        tree = {"opt_param_scheduler": {name: schedule[name] for name in _SCHEDULE_ORDER}} if schedule else {}
        return {**tree, "num_floating_point_operations_so_far": self.kept.get("num_floating_point_operations_so_far", 0.0)}

    def _chunk(self, at, chunk, parameters):
        entries = collections.OrderedDict()
        for position, one in enumerate(parameters):
            has_experts = self.has_experts_in(one.core, one.description.layer)
            try:
                name = names.name_in_style(one.core, self.style, has_experts, one.is_copy, self.experts)
            except KeyError:
                raise CheckpointError(f"{one.key} has no name in Megatron's {self.style} models.") from None
            entries[name] = TensorToWrite(self.reader.tensor(one.key).dtype, one.file_shape, self._values(one.key, one))
            stem = one.core.rpartition(".")[0]
            is_last = position + 1 == len(parameters) or parameters[position + 1].core.rpartition(".")[0] != stem
            is_embedding = one.is_copy and self.style in _LEGACY
            if is_last and names.is_linear(one.core) and not is_embedding:
                entries[names.extra_state_name(name)] = None
        stages = self.model.stages
        if self.style not in _LEGACY and stages.has_head(at.pp, chunk):
            entries.setdefault(f"output_layer.{names.EXTRA_STATE}", None)
        return _nested(entries) if self.style in _LEGACY else entries

    def _values(self, key, parameter):
        stored = self.reader.tensor(key)

        def read():
            part = whole_slice(parameter.sharding)
            values = np.empty(parameter.sharding.numel, numpy_dtype(stored.dtype))
            missing = self.reader.read(key, part, values)
            if missing:
                raise CheckpointError(f"{self.reader.folder} stores no elements {missing[0][0]} to {missing[0][1]} of {key}.")
            self._progress(values.nbytes)
            return values

        return read


_LEGACY = (names.LEGACY, names.OLD_LEGACY)
# as Megatron saves it
_SCHEDULE_ORDER = (
    *("max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr"),
    *("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps"),
)


def _nested(entries):
    """Nested dicts of a legacy model: {language_model: {embedding, encoder, output_layer}, word_embeddings_for_head}."""
    tree = {"language_model": {}}
    for name, value in entries.items():
        parts = name.split(".")
        if parts[0] != "language_model":
            tree.setdefault(parts[0], collections.OrderedDict())[".".join(parts[1:])] = value
            continue
        place = tree["language_model"]
        if parts[1] == "embedding":
            place = place.setdefault("embedding", {})
            place.setdefault(parts[2], collections.OrderedDict())[".".join(parts[3:])] = value
        else:
            place.setdefault(parts[1], collections.OrderedDict())[".".join(parts[2:])] = value
    return tree
