"""Hugging Face's files of a model (config.json, tokenizer) that are kept beside a converted checkpoint."""

import os
import shutil

from mindspeed_ms.core.dist_checkpointing.megatron import kept
from mindspeed_ms.core.logging import logger
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS
from mindspeed_ms.models.families.configuration import check_expressible, check_same_sizes, settings_of
from mindspeed_ms.models.families.family import family_of
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, MODEL_FOLDER, model_folder_of, read_json
from mindspeed_ms.models.hugging_face.writer import copy_side_files, write_json
from mindspeed_ms.tools.converter.errors import ConversionError


def check_given(conversion, source):
    """Compare the config.json of --hf-cfg-dir, which is kept, with the model of the Source.

    Raises:
        ConversionError, CheckpointError: it is of another model; names field and both values.
    """
    path = os.path.join(conversion.model_folder, CONFIG_FILE)
    base = read_json(path)
    family = family_of(base, path)
    check_same_sizes(family, source.config, base, path)
    check_expressible(family, settings_of(source.config))
    check_rows(conversion, source.reader, conversion.model_folder)


def check_rows(conversion, reader, folder):
    """Compare the rows of the vocabulary that a config.json says with those of a checkpoint: none but padding is left out.

    Args:
        conversion (Conversion): with `true_vocab_size`.
        reader (CheckpointReader): of the checkpoint.
        folder (str): of the config.json.

    Raises:
        ConversionError: it says fewer than are no padding, or more than there are.
    """
    path, rows = os.path.join(folder, CONFIG_FILE), reader.tensor(WORD_EMBEDDINGS).shape[0]
    said, true_rows = read_json(path).get("vocab_size"), conversion.true_vocab_size or reader.manifest.vocab_size or rows
    if not isinstance(said, int) or true_rows <= said <= rows:
        return
    if said < true_rows and not _knows_vocabulary(reader.manifest):
        logger.warning(
            "rows %d to %d of the vocabulary are left out as padding: %s says vocab_size %d, and the checkpoint does not "
            "say how many rows are none",
            *(said, true_rows - 1, path, said),
        )
        return
    remedy = f", or --true-vocab-size {said} if the rest is padding" if said < true_rows else ""
    raise ConversionError(
        f"{path} says vocab_size {said}, but the vocabulary of {reader.folder} has {min(true_rows, rows)} rows: give the "
        f"folder of its own model with --hf-cfg-dir{remedy}."
    )


def _knows_vocabulary(manifest):
    """Whether a checkpoint says how many rows are no padding; Megatron's args need not."""
    arguments = getattr(manifest, "arguments", None) or kept.restored(manifest.foreign.get(kept.NAME, {}).get("args"))
    return not arguments or bool(arguments.get("vocab_size"))


def write_model_folder(conversion, source, folder):
    """Keep config.json and tokenizer of the model beside a converted checkpoint, for the way back."""
    model_folder = conversion.model_folder or source.model_folder
    beside = model_folder or model_folder_of(source.reader.folder, needs_config=False)
    if beside is None and not conversion.tokenizer:
        return
    place = os.path.join(folder, MODEL_FOLDER)
    os.makedirs(place)
    if model_folder is not None:
        config = read_json(os.path.join(model_folder, CONFIG_FILE))
        if conversion.params_dtype is not None:
            config.update({name: conversion.params_dtype for name in ("dtype", "torch_dtype") if name in config})
        write_json(os.path.join(place, CONFIG_FILE), config)
    if beside is not None:
        copy_side_files(beside, place)
    copy_tokenizer(conversion, place)


def copy_tokenizer(conversion, folder):
    """Copy the files of `--tokenizer-model` and `--vocab-file`, unless the folder has them."""
    for path in conversion.tokenizer:
        if not os.path.exists(os.path.join(folder, os.path.basename(path))):
            shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
