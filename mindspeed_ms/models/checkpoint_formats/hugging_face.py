"""Hugging Face folders: config.json and weights, see `models.hugging_face`."""

import os

from mindspeed_ms.core.dist_checkpointing.foreign import ForeignFormat, register_format
from mindspeed_ms.models.hugging_face import folder
from mindspeed_ms.models.hugging_face.manifest import read_manifest


def _is_folder(path):
    return os.path.isfile(os.path.join(path, folder.CONFIG_FILE)) and folder.has_weights(path)


def _read(path, iteration, config):
    del iteration, config  # there is one, and config.json describes it
    return read_manifest(path)


HUGGING_FACE = register_format(
    ForeignFormat(
        name="hf",
        title="Hugging Face",
        holds=f"{folder.CONFIG_FILE} and model.safetensors, pytorch_model.bin or an index of several",
        is_folder=_is_folder,
        read_manifest=_read,
        keeps_tokenizer=True,
    )
)
