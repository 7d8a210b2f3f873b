"""Tokenizer of a checkpoint: from the files beside it, or from its configuration; and the ids that end a text."""

import os

from mindspeed_ms.config import argument_parser
from mindspeed_ms.config.checkpoint_tokenizer import NAMES
from mindspeed_ms.core.datasets import fingerprint
from mindspeed_ms.core.datasets.tokenizer import TokenizerError, TokenizerSettings, build_tokenizer
from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
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


def tokenizer_of(checkpoint, place, manifest, config, flags):
    """The tokenizer that flags name, compared with the checkpoint's own, else that one, else None.

    Args:
        checkpoint, place, manifest: as of `find_tokenizer`.
        config (AllConfig): read: tokenizer and load_strict.
        flags (sequence[str]): of the configuration; those of tokenizers name one.

    Returns:
        (Optional[Tokenizer], list[str]): and warnings, beside those of the configuration

    Raises:
        TokenizerError: it cannot be read, or gives other ids than the checkpoint's own, unless load_strict is off.
    """
    typed = argument_parser().parse_args([str(word) for word in flags]).typed_flags
    named = next((flag for name, flag in typed.items() if name in NAMES), None)
    if named is None:
        return find_tokenizer(checkpoint, place, manifest), []
    tokenizer = build_tokenizer(config.dataset_config)
    trained = (getattr(manifest, "fingerprint", None) or {}).get("tokenizer")
    if trained:
        is_same = fingerprint.of_tokenizer(tokenizer)["hash"] == trained["hash"]
        different = "" if is_same else f"{tokenizer.name} is not {trained['name']}, with which {place} was trained"
    else:
        different = _difference(tokenizer, checkpoint, place, manifest)
    if different and config.training_config.load_strict:
        raise TokenizerError(
            f"{named}: {different}: leave it out, or name one with the same ids; --load-strict false takes it all the same."
        )
    return tokenizer, [f"{named}: {different} (load_strict is off)"] if different and trained else []


def _difference(tokenizer, checkpoint, place, manifest):
    """In words, how the ids of a named tokenizer differ from those of the files beside the weights; "" if they do not."""
    try:
        own = find_tokenizer(checkpoint, place, manifest)
    except TokenizerError:
        return ""  # it is in place of files that cannot be read
    moved = own and tokenizer.other_ids(own)
    return f"{tokenizer.name} gives other ids than {own.name}, which lies beside the weights: {moved}" if moved else ""


def end_ids(checkpoint, place, manifest, tokenizer):
    """Ids that end a text (tuple): of generation_config.json, else of config.json, the configuration, the tokenizer.

    Raises:
        CheckpointError: a file says something else than ids.
    """
    for folder in _folders(checkpoint, place):
        for name in (_GENERATION_FILE, CONFIG_FILE):
            path = os.path.join(folder, name)
            found = read_json(path).get("eos_token_id") if os.path.isfile(path) else None
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(type(number) is int for number in ids):
                    raise CheckpointError(f"{path}: eos_token_id is {found!r}: expected the id of a token, or a list of them.")
                return tuple(ids)
    saved = (manifest.args.get("dataset_config") or {}).get("eos_token_id")
    if saved is not None:
        return (saved,)
    try:
        return () if tokenizer is None or tokenizer.eod is None else (tokenizer.eod,)
    except TokenizerError:
        return ()
