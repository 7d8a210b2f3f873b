"""Foreign checkpoints: folders of other programs that are read as they are, through a Manifest that points into their files.

The reader of a format lies where its knowledge is, which may be a room above this one; it is imported when a folder is
looked at.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignFormat:
    """Format of another program.

    Attributes:
        title (str): the program.
        recognizes (str): `module:function` of `(path) -> bool`: whether a folder holds one checkpoint; reads no tensor.
        reads (str): `module:function` of `(path) -> Manifest`, with our names; its `args` are the
            configuration of the model.
    """

    title: str
    recognizes: str
    reads: str

    def is_folder(self, path):
        """Whether a folder holds one checkpoint of the format."""
        return _function(self.recognizes)(path)

    def read_manifest(self, path):
        """Manifest of the checkpoint in a folder. CheckpointError: it cannot be read; names file and tensor."""
        return _function(self.reads)(path)


_HUGGING_FACE = "mindspeed_ms.models.hugging_face.manifest"
_MEGATRON = "mindspeed_ms.core.dist_checkpointing.megatron"
_CHECK_SUMS = "mindspeed_ms.core.dist_checkpointing.torch_file.check_sums"
FORMATS = (
    ForeignFormat("Hugging Face", f"{_HUGGING_FACE}:is_folder", f"{_HUGGING_FACE}:read_manifest"),
    ForeignFormat("Megatron", f"{_MEGATRON}.files:is_megatron_folder", f"{_MEGATRON}.manifest:read_megatron_manifest"),
)


def _function(name):
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def foreign_format(path):
    """ForeignFormat of the checkpoint that a folder holds; None if it is of none of them."""
    return next((one for one in FORMATS if one.is_folder(path)), None)


def is_foreign_folder(path):
    """Whether a folder holds a checkpoint of another program that can be read as it is."""
    return foreign_format(path) is not None


def read_foreign_manifest(path):
    """Manifest of the checkpoint in a foreign folder; None if it is no such folder.

    Raises:
        CheckpointError: it cannot be read; names file and tensor.
    """
    found = foreign_format(path)
    return None if found is None else found.read_manifest(path)


def archives_of(path, names):
    """Files of torch.save in a foreign folder, list of (name, first byte, end): see `torch_file.check_sums`."""
    return _function(f"{_CHECK_SUMS}:archives_of")(path, names) if is_foreign_folder(path) else []


def wrong_records(path, start, stop, known):
    """Records of a torch.save file whose check sum is wrong: see `torch_file.check_sums`."""
    return _function(f"{_CHECK_SUMS}:wrong_records")(path, start, stop, known)
