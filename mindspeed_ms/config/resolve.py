"""Values that follow from others across sections, and from the size of the world."""

import os

from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.settings import Settings
from mindspeed_ms.config.trio_table import FUSED_RMSNORM
from mindspeed_ms.layout.gpt_sizes import padded_vocab_size, true_vocab_size

WORLD_VARIABLES = ("MS_WORKER_NUM", "RANK_SIZE", "WORLD_SIZE")


def complete(settings):
    """Fill, before the sections are built, what follows from settings of other sections.

    Args:
        settings (Settings): changed in place.
    """
    _vocab_size(settings)
    _fused_rmsnorm(settings)
    _second_place(settings, "parallel_config.overlap_grad_reduce", "training_config.overlap_grad_reduce")
    _second_place(settings, "model_config.num_experts", "moe_config.num_experts")


def _vocab_size(settings):
    path = "dataset_config.vocab_size"
    size = settings.value(path)
    if settings.value("model_config.vocab_size") is not None or not isinstance(size, int):
        return
    divisible_by = settings.value("model_config.make_vocab_size_divisible_by", 128)
    tensor_parallel_size = settings.value("parallel_config.tensor_model_parallel_size", 1)
    extra = settings.value("dataset_config.vocab_extra_ids", 0)
    if not all(isinstance(number, int) and number >= 0 for number in (divisible_by, tensor_parallel_size, extra)):
        return  # the sections report it
    rows = true_vocab_size(size, extra, settings.value("dataset_config.tokenizer_type"))
    padded = padded_vocab_size(rows, max(divisible_by, 1), max(tensor_parallel_size, 1))
    setting = settings.by_path[path]
    settings.add("model_config.vocab_size", padded, setting.key, setting.place)
    if padded != size:
        settings.notices.append(
            f"vocabulary padded from {size} to {padded} (a multiple of make_vocab_size_divisible_by * tp)"
        )


def _fused_rmsnorm(settings):
    switch = settings.by_path.pop(FUSED_RMSNORM, None)
    path = "model_config.normalization"
    if switch is None or not switch.value:
        return
    kind = settings.value(path, "LayerNorm")
    if kind == "RMSNorm":
        settings.add(path, "FusedRMSNorm", switch.key, switch.place)
    elif kind != "FusedRMSNorm":
        settings.problems.append(
            Problem(
                switch.key, f"fuses rmsnorm, but the norm is {kind}; take rmsnorm out of the list", place=switch.place
            )
        )


def _second_place(settings, path, main):
    setting, other = settings.by_path.get(path), settings.by_path.get(main)
    if setting is None or setting.value is None:
        return
    if other is not None and other.value != setting.value and settings.was_set(main):
        settings.problems.append(
            Problem(
                setting.key,
                f"contradicts {other.key} = {other.value!r}, which is the same setting; keep one",
                setting.value,
                setting.place,
            )
        )
    settings.add(main, setting.value, setting.key, setting.place)


def environment_world_size(environment=None):
    """Number of ranks that the launcher says, or None."""
    environment = os.environ if environment is None else environment
    for name in WORLD_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:
            return int(environment[name])
    return None


def derive_sizes(all_config):
    """Fill virtual pipeline size, data parallel size, micro-batches and global batch size, as far as they follow.

    Args:
        all_config (AllConfig): checked; changed in place.
    """
    from mindspeed_ms.config.checks.pipeline import virtual_size

    parallel, dataset, model = all_config.parallel_config, all_config.dataset_config, all_config.model_config
    chunks = virtual_size(parallel, model.num_layers if model is not None else None)
    if chunks > 1:
        parallel.fill(virtual_pipeline_model_parallel_size=chunks)
    if not parallel.world_size:
        return
    size = parallel.world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    parallel.fill(data_parallel_size=size)
    if "global_batch_size" in dataset.model_fields_set and dataset.global_batch_size:
        dataset.fill(micro_batch_num=dataset.global_batch_size // (dataset.batch_size * size))
    else:
        dataset.fill(global_batch_size=dataset.batch_size * size * dataset.micro_batch_num)


def fit_to_world(all_config, world_size):
    """Tell a configuration how many ranks there are: check it against them and fill what follows.

    Args:
        all_config (AllConfig): changed in place: ``parallel_config.world_size``, ``data_parallel_size``,
            ``dataset_config.micro_batch_num``, ``global_batch_size``.
        world_size (int): number of ranks.

    Raises:
        ConfigError: if it was made for another number, or any rule is broken.
    """
    from mindspeed_ms.config.checks import check_all

    known = all_config.parallel_config.world_size
    if known not in (None, world_size):
        raise ConfigError(
            Problem(
                "parallel_config.world_size",
                f"but {world_size} ranks were started; start {known} or leave it out",
                known,
            )
        )
    all_config.parallel_config.fill(world_size=world_size)
    try:
        check_all(all_config, all_config.settings or settings_of_config(all_config))
    except ConfigError:
        all_config.parallel_config.fill(world_size=known)
        raise
    derive_sizes(all_config)


def settings_of_config(all_config):
    """Settings of an AllConfig that was made by constructors: the fields that were given."""
    settings = Settings()
    for name, section in all_config.sections().items():
        for field in type(section).own_fields():
            if field in section.model_fields_set:
                settings.add(f"{name}.{field}", getattr(section, field))
    return settings
