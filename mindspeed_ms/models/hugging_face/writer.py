"""Writer of Hugging Face folders from any checkpoint: safetensors files with an index, config.json, tokenizer."""

import json
import os
import shutil
from dataclasses import replace

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.by_tensor import Part, write_shards
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, OPTIMIZER_PREFIX, whole_slice
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.models.families.configuration import check_same_sizes, write_configuration
from mindspeed_ms.models.families.tensors import tensor_parts
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json, side_files

_DTYPE_FIELDS = ("dtype", "torch_dtype")


class HuggingFaceTarget:
    """Hugging Face folder to be written.

    Args:
        reader (CheckpointReader): what is written.
        all_config (AllConfig): its model.
        family (Family): of the model.
        model_folder (Optional[str]): folder with the config.json, tokenizer, ... that the model came from.
        most_bytes (int): of a file.
        keeps_dtype (bool): config.json's dtype stays although the tensors may have another one.

    Raises:
        CheckpointError: tensors of the checkpoint that the family does not have, or the other way round; settings that
            config.json cannot say, or says otherwise.
    """

    def __init__(self, reader, all_config, family, model_folder=None, most_bytes=5 * 10**9, keeps_dtype=True):
        self.reader, self.family, self.model_folder, self.most_bytes = reader, family, model_folder, most_bytes
        base = read_json(os.path.join(model_folder, CONFIG_FILE)) if model_folder is not None else None
        self.parts = [self._in_range(part, base) for part in tensor_parts(family, describe_model(all_config))]
        self._check_names()
        all_config = self._with_vocabulary(all_config)
        if base is not None:
            check_same_sizes(family, all_config, base, os.path.join(model_folder, CONFIG_FILE))
        self.config = write_configuration(family, all_config, base)
        dtypes = {self.reader.tensor(part.key).dtype for part in self.parts}
        if len(dtypes) == 1:
            self._set_dtype(dtypes.pop(), base, keeps_dtype)
        self.files = self._cut()

    def _in_range(self, part, base):
        """The part without padding rows of the vocabulary."""
        if part.grouping != "vocab":
            return part
        stored = self.reader.manifest.tensors.get(part.key)
        rows = self.reader.manifest.vocab_size or (stored.shape[0] if stored else 0)
        if base is not None and isinstance(base.get("vocab_size"), int):
            rows = base["vocab_size"]
        if stored is not None and not 0 < rows <= stored.shape[0]:
            raise CheckpointError(
                f"{part.key} has {stored.shape[0]} rows, but the vocabulary of the model has {rows}: give the folder of "
                "this model."
            )
        return replace(part, sharding=ParameterSharding.replicated((rows, *part.sharding.global_shape[1:])))

    def _check_names(self):
        manifest, wanted = self.reader.manifest, {part.key for part in self.parts}
        weights = {key for key in manifest.tensors if not key.startswith(OPTIMIZER_PREFIX)}
        texts = [
            f"{title}: {', '.join(sorted(names)[:8])}{' ...' if len(names) > 8 else ''}."
            for title, names in (
                ("Left in the checkpoint", weights - wanted),
                (f"Left of the {self.family.name} model", {part.name for part in self.parts if part.key not in weights}),
            )
            if names
        ]
        if texts:
            raise CheckpointError(f"{self.reader.folder} does not hold a {self.family.name} model. {' '.join(texts)}")
        for part in self.parts:
            stored, shape = manifest.tensors[part.key].shape, part.sharding.global_shape
            if stored != shape and (part.grouping != "vocab" or stored[1:] != shape[1:] or stored[0] < shape[0]):
                raise CheckpointError(
                    f"{self.reader.folder}: {part.key} has the shape {list(stored)}, but {part.name} needs {list(shape)}."
                )

    def _with_vocabulary(self, all_config):
        """The configuration with the number of rows that are written."""
        rows = next(part.shape[0] for part in self.parts if "word_embeddings" in part.key)
        all_config.model_config.vocab_size = rows
        return all_config

    def _set_dtype(self, dtype, base, keeps_dtype):
        names = [name for name in _DTYPE_FIELDS if name in self.config]
        if base is None:
            self.config["torch_dtype"] = dtype
        elif not keeps_dtype:
            self.config.update(dict.fromkeys(names, dtype))

    def _cut(self):
        """Lists of parts, one per file of at most `most_bytes`; the parts of one tensor are together."""
        files, size, tensors = [], 0, {}
        for part in self.parts:
            tensors.setdefault(part.name, []).append(part)
        for parts in tensors.values():
            nbytes = sum(map(self.nbytes, parts))
            if not files or size + nbytes > self.most_bytes:
                files.append([])
                size = 0
            files[-1] += parts
            size += nbytes
        return files

    def nbytes(self, part):
        """Bytes of a part."""
        return part.numel * DTYPE_BYTES[self.reader.tensor(part.key).dtype]

    def file_name(self, number):
        """Name of file `number`."""
        return SINGLE_FILE if len(self.files) == 1 else f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"

    def write(self, folder, progress=None, workers=1):
        """Write the folder, which exists and is empty; holds one tensor for each worker.

        Args:
            folder (str): where to.
            progress (Optional[callable]): called with the bytes of each tensor.
            workers (int): threads.

        Raises:
            CheckpointError: the source is damaged.
            OSError: no space, ...
        """
        places, shards = {}, {}
        for number, parts in enumerate(self.files):
            name = self.file_name(number)
            stacks = {part.name: self._stack(part) for part in parts if part.slot is not None}
            shards[os.path.join(folder, name)] = [self._part(part, stacks) for part in parts]
            places.update(dict.fromkeys((part.name for part in parts), name))
        write_shards(self.reader, shards, workers, progress, made_by="pt")  # as transformers asks for
        if len(self.files) > 1:
            total = sum(self.nbytes(part) for part in self.parts)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_json(os.path.join(folder, INDEX_FILE), index)
        write_json(os.path.join(folder, CONFIG_FILE), self.config)
        if self.model_folder is not None:
            copy_side_files(self.model_folder, folder)

    def _stack(self, part):
        """Entry of the tensor that holds all experts."""
        return Entry(part.name, self.reader.tensor(part.key).dtype, part.stored_shape, part.slots * self.nbytes(part))

    def _part(self, part, stacks):
        entry = Entry(part.name, self.reader.tensor(part.key).dtype, part.shape, self.nbytes(part))
        order = part.as_stored if part.alternating else None
        where = whole_slice(part.sharding)
        return Part(entry, part.key, where, part.transposed, order, stacks.get(part.name), part.slot or 0)


def copy_side_files(source, folder):
    """Copy the tokenizer's and generation's files of a model's folder; returns their names."""
    names = side_files(source)
    for name in names:
        shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    return names


def write_json(path, content):
    """Write a JSON file as Hugging Face does."""
    durable.write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
