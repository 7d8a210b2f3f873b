"""Tokenizer of the checkpoint of `use_checkpoint_args`: files beside the weights, or those of the run that wrote it."""

import os

from mindspeed_ms.config.sections.dataset import TOKENIZERS

_D = "dataset_config"
_FILES = ("tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file")
NAMES = (*_FILES, "tokenizer_type")
_BESIDE = "hugging_face"  # folder of a converted checkpoint, or of a training that started from one
_BPE = "the BPE "
_OPTION = f"{_D}.tokenizer_name_or_path"


def take_tokenizer(settings, found):
    """Take the tokenizer of a checkpoint, unless the user names one.

    Args:
        settings (Settings): changed in place; files that are no tokenizer are named in a warning.
        found (FoundCheckpoint): the checkpoint.
    """
    trained = _trained_with(found)
    if any(settings.value(f"{_D}.{name}") for name in NAMES):
        if not trained:  # trainings compare their own when they start
            _compare(settings, _beside(found))
        return
    # a run may have another tokenizer than the model that it started from, whose files are kept beside it
    places = (_configured, _beside) if trained else (_beside, _configured)
    names = next(filter(None, (place(found) for place in places[: 1 if trained.startswith(_BPE) else 2])), None)
    if names is None or not _is_readable(settings, names):
        return
    for name, value in names.items():
        settings.add(f"{_D}.{name}", value, place=found.place)
    files = " ".join(str(names[name]) for name in _FILES if name in names)
    settings.notices.append(f"the tokenizer is the checkpoint's, {files} (use_checkpoint_args)")


def _beside(found):
    """Settings of the tokenizer whose files lie in the checkpoint's folder or beside a converted one."""
    parent = os.path.dirname(os.path.abspath(found.place))
    for folder in (found.place, *(os.path.join(place, _BESIDE) for place in (found.place, found.folder, parent))):
        present = [os.path.isfile(os.path.join(folder, name)) for name in ("vocab.json", "merges.txt")]
        if all(present) or any(os.path.isfile(os.path.join(folder, f"tokenizer.{ending}")) for ending in ("json", "model")):
            return {"tokenizer_name_or_path": folder}
    return {}


def _trained_with(found):
    """Name of the tokenizer of the training that wrote the checkpoint; "" for a checkpoint that no training of ours wrote."""
    return ((getattr(found.manifest, "fingerprint", None) or {}).get("tokenizer") or {}).get("name", "")


def _configured(found):
    """Settings of the tokenizer that the run was given which wrote the checkpoint, where its files are still there."""
    manifest = found.manifest
    own = manifest.args.get(_D) or getattr(manifest, "arguments", None) or {}
    names = {name: own[name] for name in NAMES if own.get(name)}
    files = [value for name, value in names.items() if name in _FILES]
    if files:
        known = names.get("tokenizer_type") in (None, *TOKENIZERS)
        return names if known and all(isinstance(file, str) and os.path.exists(file) for file in files) else {}
    trained = _trained_with(found)
    path = trained.removeprefix(_BPE)
    # a training that goes on finds it by its text
    return {_OPTION.partition(".")[2]: path} if path != trained and not found.resumes and os.path.exists(path) else {}


def _compare(settings, beside):
    """Warn of a tokenizer that the user named and that gives other ids than the one beside the weights."""
    from mindspeed_ms.core.datasets.tokenizer import TokenizerError

    if not beside:
        return
    named = {name: settings.value(f"{_D}.{name}") for name in NAMES if settings.value(f"{_D}.{name}")}
    try:
        moved = _read(settings, named).other_ids(_read(settings, beside))
    except (TokenizerError, TypeError):  # a tokenizer that cannot be read is an error of its own option
        return
    if moved:
        files = " ".join(str(named[name]) for name in NAMES if name in named)
        place = beside["tokenizer_name_or_path"]
        settings.warn(f"the tokenizer {files} gives other ids than {place}, which lies beside the weights: {moved}")


def _read(settings, names):
    # read without MindSpore, as by `from_tokenizer`
    from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer

    use_fast = settings.value(f"{_D}.use_fast_tokenizer", True) is not False
    return build_tokenizer(TokenizerSettings(**names, use_fast=use_fast))


def _is_readable(settings, names):
    from mindspeed_ms.core.datasets.tokenizer import TokenizerError

    try:
        _read(settings, names)
    except TokenizerError as error:
        settings.warn(f"the checkpoint's tokenizer is not used, since it cannot be read: {error}")
        return False
    return True
