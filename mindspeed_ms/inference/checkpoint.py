"""Checkpoint that is to be loaded: configuration, context, tokenizer and end tokens, known before its model is built.

Imports no MindSpore.
"""

import os
from dataclasses import dataclass

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.machine import cards, host_memory
from mindspeed_ms.inference.configuration import LoadError, configuration
from mindspeed_ms.inference.tokenizer import end_ids, tokenizer_of
from mindspeed_ms.layout.key_value_cache import cache_bytes
from mindspeed_ms.layout.ranks import world_unit_of
from mindspeed_ms.models.adapter_files import with_adapters
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, has_weights

LONGEST_DEFAULT = 8192
"""Largest max_sequence_length that is taken without being asked for: the cache is allocated whole."""
DEFAULT_PREFILL_CHUNK = 512
_LENGTH = "max_sequence_length"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is to be loaded.

    Attributes:
        place (str), manifest (Manifest): of the checkpoint, or of the base of its adapters.
        iteration (Optional[int]): that was asked for.
        adapters (Optional[Adapters]): to be merged into the weights.
        config (AllConfig): model, layout and precision.
        max_sequence_length (int), vocab_size (int): of the runner.
        tokenizer (Optional[Tokenizer]): None: ids only.
        eos_ids (tuple[int]): tokens that end a text.
        warnings (list[str]): what is not used as it was typed.
    """

    place: str
    manifest: object
    iteration: int | None
    adapters: object
    config: object
    max_sequence_length: int
    vocab_size: int
    tokenizer: object
    eos_ids: tuple
    warnings: list

    @property
    def model(self):
        """ModelDescription of the model in its layout."""
        return describe_model(self.config)

    @property
    def has_further_predictions(self):
        """Whether the checkpoint has layers of multi-token prediction, which decoding has no use for: they are left out."""
        return bool(self.manifest.args["model_config"].get("mtp_num_layers"))

    @property
    def ranks(self):
        """Number of ranks (int)."""
        return world_unit_of(self.model.parallel)

    def check_memory(self, slots, prefill_chunk=DEFAULT_PREFILL_CHUNK, length_name=_LENGTH, slots_name="slots"):
        """Check that the cache fits into the memory of this machine, where that holds it.

        Args:
            slots, prefill_chunk (int): as of `inference.loading.load`.
            length_name, slots_name (str): in the error.

        Raises:
            LoadError: it does not.
        """
        length = self.max_sequence_length
        needed, there = cache_bytes(self.model, slots, length, min(prefill_chunk, length)), host_memory()
        if needed > there and not cards():
            raise LoadError(
                f"{length_name} {length} with {slots_name} {slots} needs a cache of {needed / 1e9:,.1f} GB, but this machine "
                f"has {there / 1e9:,.1f} GB of memory: lower one of them."
            )


def read_checkpoint(
    checkpoint,
    *,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    dtype=None,
    max_sequence_length=None,
    iteration=None,
    adapter=None,
    flags=(),
    length_name=_LENGTH,
):
    """The Checkpoint of a folder.

    Args:
        checkpoint (str): as of `inference.loading.load`.
        tensor_model_parallel_size, pipeline_model_parallel_size (int): their product is the number of ranks, unless experts
            need more: `layout.ranks.world_unit`.
        expert_model_parallel_size (int): ranks that share the experts of a layer; each does the rest of the model as well.
        expert_tensor_parallel_size (Optional[int]): ranks that share an expert; None: tensor_model_parallel_size.
        dtype (Optional[str]): of parameters, computation and cache: float32, bfloat16, float16; None: the checkpoint's.
        max_sequence_length (Optional[int]): longest sequence; None: what the model was trained for, at most 8192.
        iteration (Optional[int]): of a run's checkpoints; None: the newest.
        adapter (Optional[str]): adapters on top of the checkpoint: folder of a run with adapters, or of PEFT. These, or those
            of the checkpoint, are merged into the weights.
        flags (sequence[str]): further flags of the configuration, such as --num-layers-per-virtual-pipeline-stage N.
        length_name (str): of the length in errors.

    Raises:
        CheckpointError, ValueError: as of `inference.loading.load`.
    """
    place, manifest = find_checkpoint(checkpoint, iteration)
    place, manifest, adapters = with_adapters(place, manifest, adapter)
    if adapters is not None:
        adapters.check_base({key: one.shape for key, one in manifest.tensors.items()}, manifest.args, place)
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
    }
    for name, value in {**sizes, length_name: max_sequence_length}.items():
        if value is not None or name not in (length_name, "expert_tensor_parallel_size"):
            require_positive(name, value)
    saved = manifest.args["model_config"]
    length = _context_length(max_sequence_length, saved, length_name)
    config, warnings = configuration(place, manifest, sizes, dtype, length, flags)
    tokenizer, more = tokenizer_of(checkpoint, place, manifest, config, flags)
    vocab_size = manifest.vocab_size or stored_vocabulary(config, manifest)
    ends = end_ids(checkpoint, place, manifest, tokenizer)
    return Checkpoint(place, manifest, iteration, adapters, config, length, vocab_size, tokenizer, ends, warnings + more)


def require_positive(name, value):
    """Raise LoadError unless the value of a name is an integer > 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{name} is {value!r}: expected an integer > 0.")


def find_checkpoint(checkpoint, iteration):
    """(folder, Manifest) of the checkpoint. CheckpointError without one."""
    path = os.fspath(checkpoint)
    if os.path.isfile(path) and path.endswith(".gguf"):
        raise CheckpointError(
            f"{path} is a GGUF file, whose weights must be unpacked: convert it with convert_ckpt.py --load-dir {path} "
            "--save-dir FOLDER --save-model-type hf, and load FOLDER."
        )
    place, manifest = newest_manifest(path, iteration)
    if iteration is not None and manifest.iteration != iteration:
        raise CheckpointError(f"{path} is one checkpoint, not a run with several: leave the iteration ({iteration}) out.")
    if not manifest.args.get("model_config"):
        missing = f" If it is a Hugging Face folder, its {CONFIG_FILE} is missing: copy it there." if has_weights(place) else ""
        raise CheckpointError(f"{place} holds no configuration of its model, which inference takes from there.{missing}")
    return place, manifest


def stored_vocabulary(config, manifest):
    """Rows of the vocabulary (int) that a checkpoint has; a configuration of more ranks may have further ones, as padding."""
    rows = config.model_config.vocab_size
    return min(rows, manifest.args["model_config"].get("vocab_size") or rows)


def _context_length(length, saved, name):
    """Longest sequence (int): the given one, checked, or the model's."""
    positions = saved.get("max_position_embeddings") or saved.get("seq_length")
    if length is None:
        return min(positions, LONGEST_DEFAULT)
    if saved.get("position_embedding_type") == "learned_absolute" and length > positions:
        raise LoadError(f"{name} is {length}: the model has a table of {positions} learned positions, expected at most that.")
    return length
