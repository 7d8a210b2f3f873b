"""Foreign checkpoint formats: a registry, and the one way to read a folder of any of them, or of ours, as a Manifest.

A foreign checkpoint is read as it is, through a Manifest whose pieces point into its files. Each format is one module of
`models.checkpoint_formats`, which registers it; all are imported when a folder is looked at for the first time.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest

_FORMATS_ROOM = "mindspeed_ms.models.checkpoint_formats"  # above this room: imported by its name
_CHECK_SUMS = "mindspeed_ms.core.dist_checkpointing.torch_file.check_sums"
_SHOWN = 8  # names in a folder
_FORMATS = {}


@dataclass(frozen=True, kw_only=True)
class ForeignFormat:
    """Format of checkpoints that this program does not save by itself.

    Attributes:
        name (str): short, as flags have it ("hf").
        title (str): for people ("Hugging Face").
        holds (str): what a folder of it holds, for the message about a folder that is of no format.
        is_folder (Callable): `(path) -> bool`: whether an existing folder holds a checkpoint of the format, complete or not;
            reads no tensor. No folder is of two formats.
        read_manifest (Callable): `(path, iteration, config) -> Manifest`, see `read_manifest`; its tensors
            have our names.
        keeps_tokenizer (bool): its files, or others in the folder, say which tokenizer the model was trained with.
        needs_config (bool): its files do not say what model they hold, and cannot be read without knowing.
    """

    name: str
    title: str
    holds: str
    is_folder: Callable
    read_manifest: Callable
    needs_config: bool = False
    keeps_tokenizer: bool = False


def register_format(one):
    """Register a ForeignFormat under its name; returns it.

    Raises:
        ValueError: the name has another format already.
    """
    if _FORMATS.setdefault(one.name, one) is not one:
        raise ValueError(f"{one.name!r} names a checkpoint format already: choose another name.")
    return one


def foreign_formats():
    """All registered formats by name: dict."""
    importlib.import_module(_FORMATS_ROOM)
    return dict(_FORMATS)


def foreign_format(path):
    """ForeignFormat of the checkpoint that a folder holds; None if it is of none of them."""
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, MANIFEST_FILE)):
        return None
    return next((one for one in foreign_formats().values() if one.is_folder(path)), None)


def is_foreign_folder(path):
    """Whether a folder holds a checkpoint of a foreign format."""
    return foreign_format(path) is not None


def read_manifest(path, iteration=None, config=None):
    """Manifest of the one checkpoint in a folder, of ours or of a foreign format.

    Args:
        path (str): the folder.
        iteration (Optional[int]): which, of a foreign folder with several in one.
        config (Optional[AllConfig]): the model, for formats whose files do not say it; its parallel sizes do not matter.

    Raises:
        CheckpointError: it cannot be read; names file and tensor.
    """
    found = foreign_format(path)
    if found is None:
        return Manifest.read(path)
    if found.needs_config and config is None:
        raise CheckpointError(f"{path} is of {found.title} format, whose files hold no configuration of the model")
    return found.read_manifest(path, iteration, config)


def what_was_found(path):
    """Text for a folder that is no checkpoint: what it holds, and what was looked for."""
    if not os.path.isdir(path):
        why = "is a file, not a folder" if os.path.exists(path) else "does not exist"
        return f"{path or repr(path)} holds no checkpoint: it {why}."
    names = sorted(name + ("/" if os.path.isdir(os.path.join(path, name)) else "") for name in os.listdir(path))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    formats = "; ".join(f"{one.title} ({one.holds})" for one in foreign_formats().values())
    return (
        f"{path} holds no checkpoint: there is {shown or 'nothing'} in it. Looked for: a run or a checkpoint of ours, or a run "
        f"of Megatron (latest_checkpointed_iteration.txt, iter_*, {MANIFEST_FILE}); {formats}."
    )


def archives_of(path, names):
    """Files of torch.save in a foreign folder, list of (name, first byte, end): see `torch_file.check_sums`."""
    return importlib.import_module(_CHECK_SUMS).archives_of(path, names) if is_foreign_folder(path) else []


def wrong_records(path, start, stop, known):
    """Records of a torch.save file whose check sum is wrong: see `torch_file.check_sums`."""
    return importlib.import_module(_CHECK_SUMS).wrong_records(path, start, stop, known)
