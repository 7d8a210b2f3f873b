"""GGUF files (llama.cpp) as Hugging Face folders: de-quantised weights, config.json, tokenizer. Needs the extra `[gguf]`.

Names and metadata: the GGUF specification; de-quantisation: the library's own numpy code.
"""

import importlib
import os

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.models.families.configuration import read_configuration
from mindspeed_ms.models.families.family import families
from mindspeed_ms.models.families.tensors import tensor_parts
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, SINGLE_FILE
from mindspeed_ms.models.hugging_face.gguf_tokenizer import write_tokenizer
from mindspeed_ms.models.hugging_face.writer import write_json

_LAYER = "language_model.encoder.layers.{layer}"
# our tensor -> theirs, in the order of a family's
_NAMES = {
    "language_model.embedding.word_embeddings.weight": ("token_embd.weight",),
    "language_model.encoder.final_norm.weight": ("output_norm.weight",),
    "language_model.output_layer.weight": ("output.weight",),
    f"{_LAYER}.input_norm.weight": ("blk.{layer}.attn_norm.weight",),
    f"{_LAYER}.post_attention_norm.weight": ("blk.{layer}.ffn_norm.weight",),
    **{
        f"{_LAYER}.attention.qkv_proj.{end}": tuple(f"blk.{{layer}}.attn_{x}.{end}" for x in "qkv")
        for end in ("weight", "bias")
    },
    f"{_LAYER}.attention.out_proj.weight": ("blk.{layer}.attn_output.weight",),
    **{f"{_LAYER}.attention.{x}_layernorm.weight": (f"blk.{{layer}}.attn_{x}_norm.weight",) for x in "qk"},
    f"{_LAYER}.mlp.mapping.weight": ("blk.{layer}.ffn_gate.weight", "blk.{layer}.ffn_up.weight"),
    f"{_LAYER}.mlp.projection.weight": ("blk.{layer}.ffn_down.weight",),
}
# field of config.json -> metadata behind the architecture's name
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
# rows of query and key stand in pairs there, as these architectures are rotated
_PAIRED = ("llama",)
_COMPUTED = ("rope_freqs.weight",)


class GgufModel:
    """Model in a GGUF file.

    Args:
        path (str): of the file.

    Attributes:
        config (dict): config.json that it means.
        parts (list[TensorPart]): its tensors, by Hugging Face's names.

    Raises:
        CheckpointError: no GGUF file, an unknown architecture, or tensors that do not fit the metadata.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._library = _library()
        try:
            reader = self._library.GGUFReader(self.path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{self.path} cannot be read as a GGUF file: {error}.") from error
        self.metadata = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.value("general.architecture")
        if self.architecture not in ("llama", "qwen2", "qwen3"):
            raise CheckpointError(f"{self.path} has the architecture {self.architecture!r}: expected llama, qwen2 or qwen3.")
        self.family = families()[self.architecture]
        self.config = self._config()
        model = describe_model(read_configuration(self.family, self.config, self.path))
        self._names = self._names_of(model.num_layers)
        self.parts = tensor_parts(self.family, model)
        self._check()

    def value(self, key):
        """Metadata by its key; None if there is none."""
        field = self.metadata.get(key)
        return None if field is None else field.contents()

    def _config(self):
        values = {name: self.value(f"{self.architecture}.{key}") for name, key in _FIELDS.items()}
        missing = [f"{self.architecture}.{_FIELDS[name]}" for name in _REQUIRED if values[name] is None]
        if missing or "token_embd.weight" not in self._tensors:
            raise CheckpointError(f"{self.path} has no {missing[0] if missing else 'tensor token_embd.weight'}.")
        scaling = self.value(f"{self.architecture}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise CheckpointError(f"{self.path} has rope.scaling.type {scaling!r}, which is not converted.")
        numbers = {name: _shortest(value) for name, value in values.items() if value is not None}
        ids = {
            f"{name}_token_id": self.value(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        return {
            "architectures": [self.family.architecture],
            "model_type": self.family.name,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_act": "silu",
            **numbers,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **{name: value for name, value in ids.items() if value is not None},
            "torch_dtype": "float32",
        }

    def _names_of(self, layers):
        """{Hugging Face's name: GGUF's}."""
        return {
            theirs.format(layer=layer): name.format(layer=layer)
            for weight in self.family.weights
            for theirs, name in zip(weight.theirs, _NAMES.get(weight.ours, ()))
            for layer in (range(layers) if "{layer}" in theirs else (0,))
        }

    def _check(self):
        wanted = {self._names.get(part.name, part.name) for part in self.parts}
        found = set(self._tensors) - set(_COMPUTED)
        if wanted != found:
            raise CheckpointError(
                f"{self.path} does not hold a {self.architecture} model of its metadata. Tensors that are missing: "
                f"{', '.join(sorted(wanted - found)[:5]) or 'none'}. Left over: "
                f"{', '.join(sorted(found - wanted)[:5]) or 'none'}."
            )
        for part in self.parts:
            tensor = self._tensors[self._names[part.name]]
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if shape != part.shape:
                sizes = f"the shape {list(shape)}, expected {list(part.shape)}"
                raise CheckpointError(f"{self.path}: tensor {tensor.name} has {sizes}.")

    def read(self, part):
        """Values of a tensor (numpy, float32)."""
        tensor = self._tensors[self._names[part.name]]
        values = np.asarray(self._library.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(part.shape)
        if self.architecture in _PAIRED and part.grouping == "qkv" and (".q_proj." in part.name or ".k_proj." in part.name):
            groups = self.config.get("num_key_value_heads", self.config["num_attention_heads"])
            heads = self.config["num_attention_heads"] if ".q_proj." in part.name else groups
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return np.ascontiguousarray(values)

    @property
    def nbytes(self):
        """Bytes of all values."""
        return sum(part.numel for part in self.parts) * DTYPE_BYTES["float32"]

    def write(self, folder, progress=None):
        """Write a Hugging Face folder, which exists and is empty; holds one tensor at a time.

        Returns:
            list[str]: notes about what was left out.
        """

        def entry(part):
            def data():
                values = self.read(part)
                if progress is not None:
                    progress(values.nbytes)
                return values.reshape(-1).view(np.uint8)

            return Entry(part.name, "float32", part.shape, part.numel * DTYPE_BYTES["float32"], data)

        write_shard(os.path.join(folder, SINGLE_FILE), [entry(part) for part in self.parts], made_by="pt")
        write_json(os.path.join(folder, CONFIG_FILE), self.config)
        return write_tokenizer(self, folder)


def _shortest(value):
    """A number of metadata as Python's; float32 ones in their shortest decimal form."""
    return float(str(np.float32(value))) if isinstance(value, float) else int(value)


def _library():
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError("a GGUF file needs the library gguf: pip install 'mindspeed_ms[gguf]'.") from None
