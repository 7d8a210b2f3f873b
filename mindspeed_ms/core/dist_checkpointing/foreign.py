"""Foreign checkpoints: folders of other programs that are read as they are, through a Manifest that points into their files.

A format is a module with two functions. It lies where its knowledge is, which may be a room above this one, and is
imported when a folder is looked at:

    is_folder(path) -> bool                      whether a folder holds a checkpoint of the format; reads no tensor
    read_manifest(path, iteration=None)          Manifest with our names; `args` is the configuration of its model
"""

import importlib
import os

_FORMATS = {"Hugging Face": "mindspeed_ms.models.hugging_face.manifest"}


def foreign_format(path):
    """(title, module) of the format that a folder holds a checkpoint of; None if it is of none of them."""
    if not os.path.isdir(path):
        return None
    for title, name in _FORMATS.items():
        module = importlib.import_module(name)
        if module.is_folder(path):
            return title, module
    return None


def is_foreign_folder(path):
    """Whether a folder holds a checkpoint of another program that can be read as it is."""
    return foreign_format(path) is not None


def read_foreign_manifest(path, iteration=None):
    """Manifest of the checkpoint in a foreign folder; None if it is no such folder.

    Raises:
        CheckpointError: it cannot be read; names file and tensor.
    """
    found = foreign_format(path)
    return None if found is None else found[1].read_manifest(path, iteration)
