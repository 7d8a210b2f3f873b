"""Derived values: settings that follow from settings of several sections or from the world size."""

import os

from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.config.checks import check_all
from mindspeed_ms.config.checks.pipeline import virtual_size
from mindspeed_ms.config.checks.rule import Context
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.sections.posttrain import PAIRWISE_STAGES, PER_TOKEN_STAGES
from mindspeed_ms.config.sections.training import LOSS_SCALE
from mindspeed_ms.config.settings import Settings
from mindspeed_ms.config.trio_table import FUSED_RMSNORM
from mindspeed_ms.layout.ranks import model_parallel_size
from mindspeed_ms.layout.vocabulary import padded_vocab_size, true_vocab_size

WORLD_VARIABLES = ("MS_WORKER_NUM", "RANK_SIZE", "WORLD_SIZE")


def complete(settings):
    """Fill, before the sections are built, settings that follow from settings of other sections.

    Args:
        settings (Settings): changed in place.
    """
    _vocab_size(settings)
    _fused_rmsnorm(settings)
    _second_place(settings, "parallel_config.overlap_grad_reduce", "training_config.overlap_grad_reduce")
    _second_place(settings, "model_config.num_experts", "moe_config.num_experts")
    _whole_experts(settings)


def _whole_experts(settings):
    """`moe_extended_tp`: experts are spread over tensor-parallel ranks, none is cut."""
    path = "parallel_config.expert_tensor_parallel_size"
    switch = settings.by_path.get("moe_config.moe_extended_tp")
    if switch is not None and switch.value is True and settings.value(path) is None:
        settings.add(path, 1, switch.key, switch.place)


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
        settings.notices.append(f"vocabulary padded from {size} to {padded} (a multiple of make_vocab_size_divisible_by * tp)")


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
            Problem(switch.key, f"fuses rmsnorm, but the norm is {kind}; take rmsnorm out of the list", place=switch.place)
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


def _settle(all_config, settings):
    """Fill, before the rules run, values that settings of several sections decide together; notices name the changes."""
    context = Context(all_config, settings)
    for derivation in (_loss_scale, _nan_checks, _data_parallel_wrapper, _schedules, _clipping, _rope_fusion, _stage):
        derivation(context)
    if all_config.parallel_config.overlap_grad_reduce:
        all_config.training_config.fill(overlap_grad_reduce=True)


def _loss_scale(context):
    """Fill Megatron's defaults for those of loss_scale_value, _factor and _window that the arguments leave out."""
    paths = [f"training_config.{name}" for name in LOSS_SCALE]
    missing = [path for path in paths if context.value(path) is None]
    if any(context.was_argument(path) for path in paths):
        context.training.fill(**{path.rpartition(".")[2]: row_at(path).megatron_default for path in missing})


def _nan_checks(context):
    """Switch the NaN checks off under a dynamic loss scale: it skips steps that overflow, as in Megatron."""
    training = context.training
    on = [name for name in ("check_for_nan_in_loss", "check_for_nan_in_grad") if training[name]]
    if not training.dynamic_loss_scale or not on:
        return
    paths = [f"training_config.{name}" for name in on]
    asked = [context.name(path) for path in paths if context.was_set(path)]
    training.fill(**dict.fromkeys(on, False))
    if asked:
        context.notice(
            f"{' and '.join(dict.fromkeys(asked))}: switched off, since fp16 with a dynamic loss scale skips steps that "
            "overflow; a constant loss_scale keeps the check"
        )


def _data_parallel_wrapper(context):
    """Switch the data parallel wrapper on if the distributed optimizer, ZeRO or its own switches need it."""
    training, asked = context.training, context.ddp_switches
    if training.wrap_with_ddp:
        return
    if training.use_distributed_optimizer or context.parallel.zero_level:
        cause = "use_distributed_optimizer" if training.use_distributed_optimizer else "zero_level"
    elif asked and not context.was_set("training_config.wrap_with_ddp"):
        cause = ", ".join(asked)
    else:
        return
    training.fill(wrap_with_ddp=True)
    context.notice(f"wrap_with_ddp was switched on, since {cause} needs it")


def _schedules(context):
    """Switch `use_checkpoint_opt_param_scheduler` off under an override, unless the user set both."""
    names = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    both_asked = all(context.was_set(f"optimizer_config.{name}") for name in names)
    if context.optimizer.override_opt_param_scheduler and not both_asked:
        context.optimizer.fill(use_checkpoint_opt_param_scheduler=False)


def _clipping(context):
    """Take the clipping of `training_config.grad_clip_kwargs`, unless `optimizer_config.clip_grad` was set."""
    kwargs = context.training.grad_clip_kwargs
    if kwargs and not context.was_set("optimizer_config.clip_grad"):
        context.optimizer.fill(clip_grad=kwargs.clip_value, clip_grad_type=kwargs.grad_clip_type)


def _rope_fusion(context):
    """Switch RoPE fusion off for interleaved rotation, which the fused operator lacks."""
    model = context.model
    if model is not None and model.rotary_interleaved and not context.was_set("model_config.apply_rope_fusion"):
        model.fill(apply_rope_fusion=False)


def _stage(context):
    """Fill what follows from the stage of post-training: kind of data, and a loss over the tokens of the global batch."""
    stage, training = context.training.stage, context.training
    if stage is None:
        return
    kind = "is_pairwise_dataset" if stage in PAIRWISE_STAGES else "is_instruction_dataset"
    if not context.was_set(f"dataset_config.{kind}"):
        context.dataset.fill(**{kind: True})
    if stage in PER_TOKEN_STAGES and not context.was_set("training_config.calculate_per_token_loss"):
        training.fill(calculate_per_token_loss=not training.average_in_collective)
        if training.average_in_collective:
            context.notice(f"average_in_collective: the loss of stage {stage} is a mean of means over micro-batches")


def environment_world_size(environment=None):
    """Number of ranks in the launcher's environment variables, or None."""
    environment = os.environ if environment is None else environment
    for name in WORLD_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:
            return int(environment[name])
    return None


def _derive_sizes(all_config):
    """Fill virtual pipeline size, data parallel size, micro-batches and global batch size, as far as they follow."""
    parallel, dataset, model = all_config.parallel_config, all_config.dataset_config, all_config.model_config
    chunks = virtual_size(parallel, model.num_layers if model is not None else None)
    if chunks > 1:
        parallel.fill(virtual_pipeline_model_parallel_size=chunks)
    if not parallel.world_size:
        return
    size = parallel.world_size // model_parallel_size(parallel)
    parallel.fill(data_parallel_size=size)
    if "global_batch_size" in dataset.model_fields_set and dataset.global_batch_size:
        dataset.fill(micro_batch_num=dataset.global_batch_size // (dataset.batch_size * size))
    else:
        dataset.fill(global_batch_size=dataset.batch_size * size * dataset.micro_batch_num)


def check(all_config, settings):
    """Settle, check and derive: what `fit_to_world` repeats, since sections may have been assigned to in between.

    Args:
        all_config (AllConfig): changed in place.
        settings (Settings): what the user set.

    Raises:
        ConfigError: every problem that the rules found.
    """
    _settle(all_config, settings)
    check_all(all_config, settings)
    _derive_sizes(all_config)


def fit_to_world(all_config, world_size):
    """Check a configuration against the number of ranks and fill the sizes that depend on it.

    Args:
        all_config (AllConfig): changed in place: `parallel_config.world_size`, `data_parallel_size`,
            `dataset_config.micro_batch_num`, `global_batch_size`.
        world_size (int): number of ranks.

    Raises:
        ConfigError: if it was made for another number, or any rule is broken.
    """
    known = all_config.parallel_config.world_size
    if known not in (None, world_size):
        raise ConfigError(
            Problem("parallel_config.world_size", f"but {world_size} ranks were started; start {known} or leave it out", known)
        )
    all_config.parallel_config.fill(world_size=world_size)
    settings = all_config.settings or settings_of_config(all_config)
    try:
        check(all_config, settings)
    except ConfigError:
        all_config.parallel_config.fill(world_size=known)
        raise


def settings_of_config(all_config):
    """Settings of an AllConfig that was built by constructors: the fields that were given."""
    settings = Settings()
    for name, section in all_config.sections().items():
        for field in type(section).own_fields():
            if field in section.model_fields_set:
                settings.add(f"{name}.{field}", getattr(section, field))
    return settings
