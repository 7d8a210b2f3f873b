"""`use_checkpoint_args`: settings of the model from the configuration in the checkpoint; they win over typed ones.

Which settings: `same_model`'s, which hold those that Megatron takes (`load_args_from_checkpoint`); and the tokenizer, as under
Megatron's `use_tokenizer_model_from_checkpoint_args`.
"""

from dataclasses import dataclass

from mindspeed_ms.config.beneath import DEFAULT_CONFIGURATION
from mindspeed_ms.config.checkpoint_tokenizer import NAMES, take_tokenizer
from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.same_model import is_same, model_paths
from mindspeed_ms.config.schema import TrainingConfig
from mindspeed_ms.config.sections.field import COMPARED, TAKEN
from mindspeed_ms.config.trio_table import FUSED_RMSNORM
from mindspeed_ms.layout.vocabulary import padded_vocab_size, true_vocab_size

_T, _M = "training_config", "model_config"
_OUTPUT = TrainingConfig.model_fields["output_dir"].default
_LENGTH = f"{_M}.seq_length"
_D, _P = "dataset_config", "parallel_config"
_PADDING = ("vocab_size", "make_vocab_size_divisible_by")


@dataclass(frozen=True)
class FoundCheckpoint:
    """Checkpoint that a run with `use_checkpoint_args` starts from.

    Attributes:
        folder (str): as it was named: of a run or of one checkpoint.
        place (str): folder of the checkpoint itself.
        manifest (Manifest): with the configuration in `args`.
        resumes (bool): the training goes on.
    """

    folder: str
    place: str
    manifest: object
    resumes: bool


def ask_checkpoint(settings):
    """Take model and tokenizer from the checkpoint that the run starts from, if `use_checkpoint_args` is set.

    A setting that was typed and differs is named in a warning; the checkpoint wins. Only `seq_length` stays as it was typed,
    which a warning names too, and so does a tokenizer. Model and layout of a configuration that the user did not name give way
    without a word.

    Args:
        settings (Settings): changed in place; a checkpoint that cannot be read becomes a problem.

    Returns:
        Optional[FoundCheckpoint]: for `ask_vocabulary`, once the tokenizer has said its size.
    """
    if not settings.is_on(f"{_T}.use_checkpoint_args"):
        return None
    found = _find(settings)
    if found is None:
        return None
    place, saved = found.place, found.manifest.args
    _drop_defaults(settings)
    take_tokenizer(settings, found)
    paths = [*model_paths(COMPARED, TAKEN), *(() if _keeps_length(settings, found) else (_LENGTH,))]
    for path in paths:
        section, name = path.split(".")
        if name in saved.get(section, {}):
            _take(settings, path, saved[section][name], place)
    return found


def _keeps_length(settings, found):
    """Whether `seq_length` stays as it was given; a warning names the checkpoint's."""
    given, positions = settings.by_path.get(_LENGTH), settings.by_path.get(f"{_M}.max_position_embeddings")
    # one key of the trio gives both
    value = found.manifest.args.get(_M, {}).get("seq_length")
    if not settings.was_set(_LENGTH) and found.manifest.has_only_weights:
        settings.notices.append(f"seq_length (--seq-length) is not given: samples have the model's {value} positions")
    if not settings.was_set(_LENGTH) or (positions is not None and positions.key == given.key):
        return False
    # weights alone have no length: theirs is the largest
    fits = found.manifest.has_only_weights and isinstance(given.value, int) and isinstance(value, int) and given.value <= value
    if value is not None and not fits and not is_same(given.value, value):
        settings.warn(
            f"{given.key} = {given.value!r} ({given.place}) stays although the checkpoint has {value!r}: "
            "use_checkpoint_args takes it from there only if it is left out"
        )
    return True


def _drop_defaults(settings):
    """Drop model, vocabulary and layout of a configuration that the user did not name."""
    for path, setting in list(settings.by_path.items()):
        of_model = setting.key.startswith(f"{_M}.") or path in (f"{_D}.vocab_size", FUSED_RMSNORM)
        if setting.place == DEFAULT_CONFIGURATION and (of_model or path.startswith(f"{_P}.")):
            del settings.by_path[path]


def ask_vocabulary(settings, found):
    """Take the rows of the embedding, padding included, unless the padding is to be another.

    They stay where tensor parallel ranks can share them evenly and no other padding was typed; else the ids are padded
    anew.

    Args:
        settings (Settings): changed in place; more ids than rows become a problem.
        found (Optional[FoundCheckpoint]): what `ask_checkpoint` gave.
    """
    rows = found.manifest.args.get(_M, {}).get("vocab_size") if found is not None else None
    ids, extra = settings.value(f"{_D}.vocab_size"), settings.value(f"{_D}.vocab_extra_ids", 0)
    parts = settings.value("parallel_config.tensor_model_parallel_size", 1)
    divisible_by = settings.value(f"{_M}.make_vocab_size_divisible_by", 128)
    numbers = rows, ids or 1, parts, divisible_by, extra or 1
    if not all(isinstance(value, int) and value > 0 for value in numbers):
        return
    needed = true_vocab_size(ids, extra, settings.value(f"{_D}.tokenizer_type")) if ids else 0
    if needed > rows:
        _refuse_more_ids(settings, found, needed, rows)
    elif ids is None:
        _take(settings, f"{_M}.vocab_size" if rows % parts == 0 else f"{_D}.vocab_size", rows, found.place)
    elif not any(settings.was_set(f"{_M}.{name}") for name in _PADDING):
        kept = rows if rows % parts == 0 else padded_vocab_size(rows, divisible_by, parts)
        settings.add(f"{_M}.vocab_size", kept, place=found.place)
    elif not settings.was_set(f"{_M}.vocab_size") and needed < (found.manifest.vocab_size or 0):
        kept = padded_vocab_size(found.manifest.vocab_size, divisible_by, parts)  # no row of the checkpoint is lost
        settings.add(f"{_M}.vocab_size", kept, place=found.place)


def _refuse_more_ids(settings, found, needed, rows):
    size = settings.by_path[f"{_D}.vocab_size"]
    named = (settings.by_path.get(f"{_D}.{name}") for name in NAMES)  # a size that the user did not give is a tokenizer's
    setting = next((setting for setting in named if setting is not None and setting.key == size.key), size)
    message = (
        f"has {needed} ids, but the model of {found.place} has {rows} rows of vocabulary: name a tokenizer with at most {rows} "
        f"ids, or give the model more rows first: convert_ckpt.py --load-dir {found.folder} --save-dir NEW --save-model-type "
        f"native --make-vocab-size-divisible-by {needed}"
    )
    settings.problems.append(Problem(setting.key, message, setting.value, setting.place))


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


def _find(settings):
    """FoundCheckpoint; None if there is no checkpoint, or a problem with it."""
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
        folder, goes_on = checkpoint_to_start_from(load, own, other, resumes)
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
        settings.lacks_checkpoint = True
        return None
    return FoundCheckpoint(folder, place, manifest, goes_on)
