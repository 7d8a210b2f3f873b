"""`use_checkpoint_args`: settings of the model from the configuration in the checkpoint; they win over typed ones.

Which settings: `same_model`'s, which hold those that Megatron takes (`load_args_from_checkpoint`).
"""

from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.same_model import is_same, model_paths
from mindspeed_ms.config.schema import TrainingConfig
from mindspeed_ms.config.sections.field import COMPARED, TAKEN

_T, _M = "training_config", "model_config"
_OUTPUT = TrainingConfig.model_fields["output_dir"].default
_UNLESS_TYPED = (f"{_M}.seq_length",)
_PADDING = ("vocab_size", "make_vocab_size_divisible_by")


def ask_checkpoint(settings):
    """Take the model's settings from the checkpoint that the run starts from, if `use_checkpoint_args` is set.

    A setting that was typed and differs is named in a warning; the checkpoint wins. Only `seq_length` stays as it was typed,
    which a warning names too, and so does a vocabulary that is given without padding (`dataset_config.vocab_size`), with the
    checkpoint's padding where that fits.

    Args:
        settings (Settings): changed in place; a checkpoint that cannot be read becomes a problem.
    """
    if not settings.is_on(f"{_T}.use_checkpoint_args"):
        return
    found = _configuration(settings)
    if found is None:
        return
    place, saved = found
    paths = [*model_paths(COMPARED, TAKEN), *(path for path in _UNLESS_TYPED if not settings.was_set(path))]
    _take_vocabulary(settings, saved, place)
    for path in _UNLESS_TYPED:
        section, name = path.split(".")
        typed, value = settings.by_path.get(path), saved.get(section, {}).get(name)
        if settings.was_set(path) and value is not None and not is_same(typed.value, value):
            settings.warn(
                f"{typed.key} = {typed.value!r} ({typed.place}) stays although the checkpoint has {value!r}: "
                "use_checkpoint_args takes it from there only if it is left out"
            )
    for path in paths:
        section, name = path.split(".")
        if name in saved.get(section, {}):
            _take(settings, path, saved[section][name], place)


def _take_vocabulary(settings, saved, place):
    """Take the rows of the embedding, padding included, unless the padding is to be another.

    They stay where tensor parallel ranks can share them evenly and no other padding was typed; else the ids are padded
    anew.
    """
    rows, ids = saved.get(_M, {}).get("vocab_size"), settings.value("dataset_config.vocab_size")
    parts = settings.value("parallel_config.tensor_model_parallel_size", 1)
    if not all(isinstance(value, int) and value > 0 for value in (rows, ids or 1, parts)):
        return
    if ids is None:
        _take(settings, f"{_M}.vocab_size" if rows % parts == 0 else "dataset_config.vocab_size", rows, place)
    elif ids <= rows and rows % parts == 0 and not any(settings.was_set(f"{_M}.{name}") for name in _PADDING):
        settings.add(f"{_M}.vocab_size", rows, place=place)


def _take(settings, path, value, place):
    if isinstance(value, dict):  # a mapping, such as rope_scaling
        for key, item in value.items():
            _take(settings, f"{path}.{key}", item, place)
        return
    for leaf in [leaf for leaf in settings.by_path if value is None and leaf.startswith(f"{path}.")]:
        _warn(settings, leaf, value)
        settings.by_path.pop(leaf)
    before = settings.by_path.get(path)
    if settings.was_set(path):
        if is_same(before.value, value):
            return
        _warn(settings, path, value)
    if before is not None or value is not None:
        settings.add(path, value, place=place)


def _warn(settings, path, value):
    if settings.was_set(path):
        before = settings.by_path[path]
        settings.warn(
            f"{before.key} = {before.value!r} ({before.place}) is not used: the checkpoint has {value!r}, and "
            "use_checkpoint_args lets it win"
        )


def _configuration(settings):
    """(place of the checkpoint, its configuration by sections); None if there is no checkpoint, or a problem with it."""
    # the one place where the configuration needs checkpoints, which are read without MindSpore
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.core.dist_checkpointing.folders import checkpoint_to_start_from, newest_manifest

    setting = settings.by_path[f"{_T}.use_checkpoint_args"]
    step, own = settings.value(f"{_T}.ckpt_step"), settings.value(f"{_T}.output_dir", _OUTPUT)
    load, other = settings.value(f"{_T}.load_checkpoint"), settings.value(f"{_T}.pretrained_checkpoint")
    if not all(value is None or isinstance(value, str) for value in (load, own, other)) or isinstance(step, str):
        return None  # the sections report it
    resumes = settings.is_on(f"{_T}.resume_training") and not settings.is_on(f"{_T}.finetune")
    try:
        folder, _ = checkpoint_to_start_from(load, own, other, resumes)
        if folder is None and resumes and not settings.is_on(f"{_T}.exit_on_missing_checkpoint"):
            settings.notices.append(f"{setting.key}: {own} holds no checkpoint yet, the model is the one that is given here")
            return None
        if folder is None:
            raise CheckpointError(
                f"{own} holds none"
                if resumes
                else "none is named: set load_checkpoint (--load), pretrained_checkpoint or resume_training"
            )
        place, manifest = newest_manifest(folder, step)
        if not manifest.args.get(_M):
            raise CheckpointError(f"{place} holds no configuration of its model: give the model's settings instead")
    except CheckpointError as error:
        message = f"takes the model's settings from a checkpoint, but {error}"
        settings.problems.append(Problem(setting.key, message, setting.value, setting.place))
        return None
    return place, manifest.args
