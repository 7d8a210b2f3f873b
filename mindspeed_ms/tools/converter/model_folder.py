"""Hugging Face's files of a model (config.json, tokenizer) that are kept beside a converted checkpoint."""

import os
import shutil

from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, MODEL_FOLDER, read_json
from mindspeed_ms.models.hugging_face.writer import copy_side_files, write_json


def write_model_folder(conversion, source, folder):
    """Keep config.json and tokenizer of the model beside a converted checkpoint, for the way back."""
    model_folder = conversion.model_folder or source.model_folder
    if model_folder is None and not conversion.tokenizer:
        return
    place = os.path.join(folder, MODEL_FOLDER)
    os.makedirs(place)
    if model_folder is not None:
        config = read_json(os.path.join(model_folder, CONFIG_FILE))
        if conversion.params_dtype is not None:
            config.update({name: conversion.params_dtype for name in ("dtype", "torch_dtype") if name in config})
        write_json(os.path.join(place, CONFIG_FILE), config)
        copy_side_files(model_folder, place)
    copy_tokenizer(conversion, place)


def copy_tokenizer(conversion, folder):
    """Copy the files of `--tokenizer-model` and `--vocab-file`, unless the folder has them."""
    for path in conversion.tokenizer:
        if not os.path.exists(os.path.join(folder, os.path.basename(path))):
            shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
