"""Precedence of flags over settings of yaml files that exclude them, such as precision or warm-up; notices name each."""

from mindspeed_ms.config.beneath import DEFAULT_CONFIGURATION
from mindspeed_ms.config.settings import ARGUMENTS, COMMAND_LINE, MEGATRON_DEFAULT

HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
_O, _T, _D = "optimizer_config", "training_config", "dataset_config"
# ways to say the same
_ALTERNATIVES = (
    (f"{_O}.lr_warmup_iters", f"{_O}.lr_warmup_samples", f"{_O}.lr_warmup_fraction"),
    (f"{_O}.lr_decay_iters", f"{_O}.lr_decay_samples"),
    (f"{_T}.training_iters", f"{_D}.train_samples"),
    (f"{_D}.micro_batch_num", f"{_D}.global_batch_size"),
)


def give_way_to_flags(settings):
    """Drop settings of files that contradict a typed flag; `settings` (Settings) is changed in place."""
    _sequence_parallel(settings)
    _half_precision(settings)
    for paths in _ALTERNATIVES:
        typed = [settings.by_path[path] for path in paths if path in settings.by_path and _is_typed(settings.by_path[path])]
        for path in paths if typed else ():
            _drop(settings, path, typed[0])
    _begin_or_go_on(settings)
    _default_lowest_rate(settings)


def _is_typed(setting):
    return setting.place in (COMMAND_LINE, ARGUMENTS)


def _drop(settings, path, typed):
    """Remove what a file has set at `path` because of the setting `typed`."""
    before = settings.by_path.get(path)
    if before is None or _is_typed(before) or before.place == MEGATRON_DEFAULT:
        return
    del settings.by_path[path]
    settings.notices.append(f"{before.key} = {before.value!r} ({before.place}) gives way to {typed.key}")


def _begin_or_go_on(settings):
    """Drop a file's `resume_training` if `finetune` was typed over it, and the other way round."""
    paths = f"{_T}.finetune", f"{_T}.resume_training"
    for path, other in (paths, paths[::-1]):
        if settings.is_on(path) and _is_typed(settings.by_path[path]) and settings.is_on(other):
            _drop(settings, other, settings.by_path[path])


def _default_lowest_rate(settings):
    """Drop the lowest learning rate of a configuration that the user did not name, if the typed one lies below it."""
    rate, lowest = (settings.by_path.get(f"{_O}.{name}") for name in ("learning_rate", "min_lr"))
    if rate is None or lowest is None or not _is_typed(rate) or lowest.place != DEFAULT_CONFIGURATION:
        return
    if isinstance(rate.value, (int, float)) and rate.value < float(lowest.value):
        _drop(settings, lowest.path, rate)


def _sequence_parallel(settings):
    """Switch a file's sequence parallelism off if a tensor parallel size of 1 was typed over it, as Megatron does."""
    path = "parallel_config.sequence_parallel"
    tensor, sequence = settings.by_path.get("parallel_config.tensor_model_parallel_size"), settings.by_path.get(path)
    if tensor is None or tensor.value != 1 or not _is_typed(tensor) or not settings.is_on(path) or _is_typed(sequence):
        return
    settings.notices.append(
        f"{sequence.key} ({sequence.place}) was switched off, since {tensor.key} 1 ({tensor.place}) leaves nothing to cut"
    )
    settings.add(path, False, sequence.key, f"{tensor.key} 1")


def _half_precision(settings):
    """Drop a file's contradicting data types if --bf16 or --fp16 was typed over them."""
    for name, half in HALF_TYPES.items():
        typed = settings.by_path.get(f"training_config.{name}")
        if typed is None or typed.value is not True or not _is_typed(typed):
            continue
        allowed = {"model_config.compute_dtype": (half,), "model_config.params_dtype": (half, "float32")}
        allowed |= {f"training_config.{other}": (False,) for other in HALF_TYPES if other != name}
        for path, values in allowed.items():
            before = settings.by_path.get(path)
            if before is not None and before.value not in values:
                _drop(settings, path, typed)
