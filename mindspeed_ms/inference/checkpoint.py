"""What is known of a checkpoint before its model is built: its place, context, tokenizer, end tokens. Imports no MindSpore."""

import os
from dataclasses import dataclass

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.tokenizer import end_ids, find_tokenizer
from mindspeed_ms.models.adapter_files import with_adapters

LONGEST_DEFAULT = 8192
"""Largest max_sequence_length that is taken without being asked for: the cache is allocated whole."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What requests can be checked against before a model is loaded.

    Attributes:
        max_sequence_length (int), vocab_size (int): of the runner that `load` will give.
        tokenizer (Optional[Tokenizer]), eos_ids (tuple[int]): as of `Loaded`.
    """

    max_sequence_length: int
    vocab_size: int
    tokenizer: object
    eos_ids: tuple


def read_facts(checkpoint, iteration=None, max_sequence_length=None, tokenizer=None, adapter=None):
    """CheckpointFacts of a checkpoint; arguments and errors as of `loading.load`. A `tokenizer` is used instead of its own."""
    place, manifest = find_checkpoint(checkpoint, iteration)
    place, manifest, adapters = with_adapters(place, manifest, adapter)
    if adapters is not None:
        adapters.check_base({key: one.shape for key, one in manifest.tensors.items()}, manifest.args, place)
    saved = manifest.args["model_config"]
    if tokenizer is None:
        tokenizer = find_tokenizer(checkpoint, place, manifest)
    else:
        own = find_tokenizer(checkpoint, place, manifest)
        moved = own and tokenizer.other_ids(own)
        if moved:
            logger.warning("the tokenizer %s gives other ids than the checkpoint's own: %s", tokenizer.name, moved)
    vocab_size = manifest.vocab_size or saved.get("vocab_size")
    return CheckpointFacts(
        context_length(max_sequence_length, saved), vocab_size, tokenizer, end_ids(checkpoint, place, manifest, tokenizer)
    )


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
        raise CheckpointError(f"{place} holds no configuration of its model, which inference takes from the checkpoint.")
    return place, manifest


def context_length(length, saved):
    """Longest sequence (int): the given one, checked, or the model's."""
    positions = saved.get("max_position_embeddings") or saved.get("seq_length")
    if length is None:
        return min(positions, LONGEST_DEFAULT)
    if saved.get("position_embedding_type") == "learned_absolute" and length > positions:
        raise ValueError(
            f"max_sequence_length is {length}: the model has a table of {positions} learned positions, expected at most that."
        )
    return length
