"""Targets of a conversion: each plans its files and writes them into an empty folder."""

import os
from math import prod

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.by_tensor import Part, write_shards
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, OPTIMIZER_PREFIX, whole_slice
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry
from mindspeed_ms.core.dist_checkpointing.upstream_optimizer import scalars_of
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS, describe_parameters
from mindspeed_ms.layout.ranks import WorldLayout, model_parallel_size, world_unit_of
from mindspeed_ms.models.families.family import families, family_of
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, model_folder_of, read_json
from mindspeed_ms.models.hugging_face.writer import HuggingFaceTarget, copy_side_files
from mindspeed_ms.tools.checkpoint.rewrite import progress_bar, write_checkpoint
from mindspeed_ms.tools.checkpoint.target_layout import layout_cut
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.megatron_target import MegatronFolder
from mindspeed_ms.tools.converter.model_folder import check_rows, copy_tokenizer, write_model_folder
from mindspeed_ms.tools.converter.sides import HUGGING_FACE, MEGATRON, NATIVE, UPSTREAM


class NativeTarget:
    """Our format: one file per rank of the layout.

    Attributes:
        nbytes (int): of all tensors.
    """

    kind = NATIVE

    def __init__(self, conversion, source, reader, config):
        self.conversion, self.source, self.reader = conversion, source, reader
        self.cut = layout_cut(reader.manifest, config, conversion.data_parallel_size)
        self.nbytes = sum((part.stop - part.start) * reader.tensor(key).itemsize for parts in self.cut for key, part in parts)

    def places(self):
        """Where each of our tensors goes: {key: text}."""
        ranks = {}
        for rank, parts in enumerate(self.cut):
            for key, _ in parts:
                ranks.setdefault(key, []).append(str(rank))
        return {key: f"state of rank {', '.join(found)}" for key, found in ranks.items()}

    def elements(self):
        """Elements of the weights that are written, padding included, copies once."""
        return count_elements((key, part) for parts in self.cut for key, part in parts)

    def write(self, folder):
        """Write into a folder."""
        write_checkpoint(self.reader, folder, self.cut, self.conversion.workers)
        write_model_folder(self.conversion, self.source, folder)


def count_elements(parts):
    """Elements of the weights among parts (key, FlatSlice); equal parts count once."""
    weights = {(key, part) for key, part in parts if not key.startswith(OPTIMIZER_PREFIX)}
    return sum(part.stop - part.start for _, part in weights)


def _data_parallel_size(conversion, parallel):
    return conversion.data_parallel_size or world_unit_of(parallel) // model_parallel_size(parallel)


class UpstreamTarget:
    """Upstream's files: each rank's own, with its local names."""

    kind = UPSTREAM

    def __init__(self, conversion, source, reader, config):
        self.conversion, self.source, self.reader = conversion, source, reader
        model = describe_model(config)
        copies = _data_parallel_size(conversion, model.parallel)
        world = WorldLayout.from_description(model.parallel, model_parallel_size(model.parallel) * copies)
        states = {}
        for key in reader.manifest.tensors:
            if key.startswith(OPTIMIZER_PREFIX):
                name, _, weight = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
                states.setdefault(weight, []).append((name, key))
        self.ranks = []
        for rank in range(world.world_size):
            parts = []
            for one in describe_parameters(model, world.coordinates(rank)):
                key = one.shared_with or one.name
                part = whole_slice(one.sharding)
                parts.append((one.local_name, key, part))
                if one.shared_with is None:
                    parts += [(f"{name}.{one.local_name}", state, part) for name, state in states.get(key, ())]
            self.ranks.append(parts)
        wanted = {key for parts in self.ranks for _, key, _ in parts}
        left = sorted(set(reader.manifest.tensors) - wanted)
        if left or wanted - set(reader.manifest.tensors):
            raise CheckpointError(
                f"{reader.folder} does not hold the model of its configuration. Left over: {', '.join(left[:5]) or 'nothing'}. "
                f"Missing: {', '.join(sorted(wanted - set(reader.manifest.tensors))[:5]) or 'nothing'}."
            )
        self.nbytes = sum(
            prod(part.local_shape) * reader.tensor(key).itemsize for parts in self.ranks for _, key, part in parts
        )

    def places(self):
        """See NativeTarget."""
        ranks = {}
        for rank, parts in enumerate(self.ranks):
            for _, key, _ in parts:
                ranks.setdefault(key, []).append(str(rank))
        return {key: f"file of rank {', '.join(dict.fromkeys(found))}" for key, found in ranks.items()}

    def elements(self):
        """See NativeTarget."""
        return count_elements((key, part) for parts in self.ranks for _, key, part in parts)

    def write(self, folder):
        """See NativeTarget."""
        name, shards = f"{self.conversion.upstream_prefix}.{self.conversion.upstream_format}", {}
        for rank, parts in enumerate(self.ranks):
            path = os.path.join(folder, f"rank_{rank}", name)
            os.makedirs(os.path.dirname(path))
            shards[path] = [*self._scalars(), *(self._part(*one) for one in parts)]
        with progress_bar(self.nbytes) as bar:
            write_shards(self.reader, shards, self.conversion.workers, bar.update)
        write_model_folder(self.conversion, self.source, folder)

    def _scalars(self):
        """Parts with the optimizer's step and the schedule, if the moments are there."""
        if not any(key.startswith(OPTIMIZER_PREFIX) for key in self.reader.manifest.tensors):
            return []
        found = scalars_of(self.reader.manifest.states).items()
        arrays = [(name, np.array([value], np.int64 if isinstance(value, int) else np.float64)) for name, value in found]
        entries = [Entry(name, array.dtype.name, (1,), array.nbytes, array.view(np.uint8)) for name, array in arrays]
        return [Part(entry, entry.name, None) for entry in entries]

    def _part(self, name, key, part):
        dtype, numel = self.reader.tensor(key).dtype, part.stop - part.start
        return Part(Entry(name, dtype, part.sharding.local_shape, numel * DTYPE_BYTES[dtype]), key, part)


class HuggingFaceFolder:
    """A Hugging Face folder."""

    kind = HUGGING_FACE

    def __init__(self, conversion, source, reader, config):
        self.conversion, self.reader = conversion, reader
        self.model_folder = conversion.model_folder or source.model_folder
        self.beside = None if self.model_folder else model_folder_of(source.reader.folder, needs_config=False)
        if self.model_folder is not None and not os.path.isfile(os.path.join(self.model_folder, CONFIG_FILE)):
            raise ConversionError(f"--hf-cfg-dir {self.model_folder} has no {CONFIG_FILE}.")
        said = self.model_folder and read_json(os.path.join(self.model_folder, CONFIG_FILE)).get("vocab_size")
        if conversion.true_vocab_size not in (None, said or conversion.true_vocab_size):
            raise ConversionError(
                f"--true-vocab-size {conversion.true_vocab_size}: the {CONFIG_FILE} of {self.model_folder} says "
                f"vocab_size {said}."
            )
        if self.model_folder is not None:
            check_rows(conversion, source.reader, self.model_folder)
        keeps_dtype = conversion.params_dtype is None and reader.manifest.iteration == 0
        self.target = HuggingFaceTarget(
            reader, config, self._family(conversion), self.model_folder, conversion.most_bytes, keeps_dtype
        )
        self.nbytes = sum(map(self.target.nbytes, self.target.parts))

    def _family(self, conversion):
        if self.model_folder is not None:
            path = os.path.join(self.model_folder, CONFIG_FILE)
            return family_of(read_json(path), path)
        name = (conversion.family or "").replace("-", "_")
        if name not in families():
            raise ConversionError(
                f"--save-model-type hf needs the model's config.json: give its folder with --hf-cfg-dir, or its family with "
                f"--model-type-hf ({', '.join(sorted(families()))})."
            )
        return families()[name]

    def places(self):
        """See NativeTarget."""
        found = {}
        for number, parts in enumerate(self.target.files):
            for part in parts:
                found.setdefault(part.key, []).append(f"{part.name} in {self.target.file_name(number)}")
        return {key: "; ".join(names) for key, names in found.items()}

    def elements(self):
        """See NativeTarget."""
        return sum(part.numel for part in self.target.parts)

    def write(self, folder):
        """See NativeTarget."""
        with progress_bar(self.nbytes) as bar:
            self.target.write(folder, bar.update, self.conversion.workers)
        if self.beside is not None:
            copy_side_files(self.beside, folder)
        copy_tokenizer(self.conversion, folder)


def vocabulary_rows(reader):
    """Rows of the embedding of a checkpoint."""
    return reader.tensor(WORD_EMBEDDINGS).shape[0]


TARGETS = {NATIVE: NativeTarget, UPSTREAM: UpstreamTarget, HUGGING_FACE: HuggingFaceFolder, MEGATRON: MegatronFolder}
