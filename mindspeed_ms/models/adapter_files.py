"""Adapters and their bases by what a user names: runs, checkpoints with adapters or adapters alone, PEFT folders."""

import os

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.models import peft_folder
from mindspeed_ms.models.adapters import MergedReader, adapters_of_checkpoint, has_adapters, has_base, without_adapters
from mindspeed_ms.models.families.configuration import config_of_model, model_sections


def read_adapters(path, model):
    """Adapters of a run, of one checkpoint with adapters (alone or beside the base), or of a PEFT folder.

    Args:
        path (str): the folder.
        model (Callable): gives the ModelDescription of the base, which PEFT folders do not say.

    Raises:
        CheckpointError: none there, damaged, or of another base.
    """
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} holds no adapters: it {'is a file' if os.path.exists(path) else 'does not exist'}.")
    if peft_folder.is_peft(path):
        return peft_folder.read(path, model())
    return adapters_of_checkpoint(*newest_manifest(os.fspath(path)))


def model_of(manifest, place):
    """ModelDescription of the model in a checkpoint, without adapters."""
    return describe_model(config_of_model(model_sections(manifest.args), place), adapters=())


def with_adapters(place, manifest, adapter=None):
    """Base and adapters of what a user named.

    Args:
        place (str), manifest (Manifest): of a checkpoint: of a base, of a base with adapters, or of adapters alone, whose base
            is the one that they were trained on.
        adapter (Optional[str]): further adapters, see `read_adapters`; with a base alone.

    Returns:
        tuple: folder and Manifest of the base without adapters, and Adapters or None.

    Raises:
        CheckpointError: two adapters, or a base that is not there.
    """
    adapters = read_adapters(adapter, lambda: model_of(manifest, place)) if adapter else None
    if not has_adapters(manifest):
        return place, manifest, adapters
    if adapters is not None:
        raise CheckpointError(f"{place} has adapters already: name its base beside {adapter}, or leave that out.")
    adapters, is_whole = adapters_of_checkpoint(place, manifest), has_base(manifest)
    if not is_whole:
        place, manifest = base_of(place, manifest)
    return place, without_adapters(manifest), adapters


def merged_reader(place, manifest, adapter=None, sign=1):
    """MergedReader of what `with_adapters` finds; None without adapters."""
    place, manifest, adapters = with_adapters(place, manifest, adapter)
    return None if adapters is None else MergedReader(place, manifest, adapters, sign)


def base_of(place, manifest, base=None):
    """(folder, Manifest) of the base of a checkpoint of adapters alone: `base`, or the folder that the checkpoint names.

    Raises:
        CheckpointError: it is not there, or has no weights of its own.
    """
    path = base or (manifest.states.get("base") or {}).get("path")
    if not path or not os.path.isdir(path):
        where = f"its base {path} is not there" if path else "it does not say which base"
        raise CheckpointError(f"{place} holds adapters alone, and {where}: name the base (--load, --pretrained-checkpoint).")
    folder, found = newest_manifest(path)
    if not has_base(found):
        raise CheckpointError(f"{path}, the base of {place}, holds adapters alone: name a folder with all weights.")
    return folder, without_adapters(found)
