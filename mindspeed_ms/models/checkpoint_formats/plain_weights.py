"""Safetensors files of whole tensors without a config.json, see `core.dist_checkpointing.plain_weights`."""

import os

from mindspeed_ms.core.dist_checkpointing import plain_weights
from mindspeed_ms.core.dist_checkpointing.foreign import ForeignFormat, register_format
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE


def _is_folder(path):
    return plain_weights.is_plain(path) and not os.path.isfile(os.path.join(path, CONFIG_FILE))


def _read(path, iteration, config):
    del iteration, config  # whole tensors, under the names that they have
    return plain_weights.read_manifest(path)


PLAIN_WEIGHTS = register_format(
    ForeignFormat(
        name="weights",
        title="plain weights",
        holds=f"{plain_weights.INDEX_FILE} or {plain_weights.SINGLE_FILE}, as merge --weights-only writes them",
        is_folder=_is_folder,
        read_manifest=_read,
    )
)
