"""Tokenizer of a checkpoint: from the files beside it, or from its configuration; and the ids that end a text."""

import os

from mindspeed_ms.core.datasets.tokenizer import TokenizerError, TokenizerSettings, build_tokenizer
from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder
from mindspeed_ms.core.logging import logger
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, MODEL_FOLDER, read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_GENERATION_FILE = "generation_config.json"


def _folders(checkpoint, place):
    """Folders that may hold files of Hugging Face: those of the checkpoint and of its run, and what a conversion kept."""
    near = dict.fromkeys((os.fspath(checkpoint), place, *((os.path.dirname(place),) if _is_iteration(place) else ())))
    return [*near, *(os.path.join(folder, MODEL_FOLDER) for folder in near)]


def _is_iteration(place):
    return os.path.basename(os.path.normpath(place)).startswith(("iter_", "release"))


def find_tokenizer(checkpoint, place, manifest):
    """Tokenizer of a checkpoint, or None.

    Args:
        checkpoint, place (str): folder that the user named, and folder of the checkpoint itself.
        manifest (Manifest): its configuration names a tokenizer if it has no files beside it.

    Raises:
        TokenizerError: files of a tokenizer beside the checkpoint that cannot be read.
    """
    for folder in _folders(checkpoint, place):
        if any(os.path.isfile(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
            return from_folder(folder)
    saved = manifest.args.get("dataset_config") or {}
    names = {name: saved.get(name) for name in TokenizerSettings.__dataclass_fields__ if saved.get(name) is not None}
    settings = TokenizerSettings(**names)
    if not settings.is_given and settings.tokenizer_type is None:
        return None
    try:
        return build_tokenizer(settings)
    except TokenizerError as error:
        logger.warning("no tokenizer, ids only: the checkpoint names one that cannot be read: %s", error)
        return None


def end_ids(checkpoint, place, manifest, tokenizer):
    """Ids that end a text (tuple): of generation_config.json, else of config.json, the configuration, the tokenizer."""
    for folder in _folders(checkpoint, place):
        for name in (_GENERATION_FILE, CONFIG_FILE):
            path = os.path.join(folder, name)
            found = read_json(path).get("eos_token_id") if os.path.isfile(path) else None
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    saved = (manifest.args.get("dataset_config") or {}).get("eos_token_id")
    if saved is not None:
        return (saved,)
    try:
        return () if tokenizer is None or tokenizer.eod is None else (tokenizer.eod,)
    except TokenizerError:
        return ()
