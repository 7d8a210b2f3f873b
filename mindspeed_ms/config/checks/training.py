"""Rules about the run: batches, precision, gradient reduction, checkpoints, data."""

import math
import os

from mindspeed_ms.config.checks.pipeline import ramp_up_sizes
from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.training import LOSS_SCALE

_T, _D, _P, _O = "training_config", "dataset_config", "parallel_config", "optimizer_config"


@rule
def global_batch_fits(context):
    """Refuse a global batch size that is no multiple of micro-batch size * data parallel size; name the nearest ones."""
    dataset, size = context.dataset, context.data_parallel_size
    path = f"{_D}.global_batch_size"
    if not dataset.global_batch_size or not context.was_set(path):
        return
    unit = dataset.batch_size * (size or 1)
    if dataset.decrease_batch_size_if_needed and dataset.global_batch_size >= unit:
        return
    if dataset.global_batch_size % unit:
        below = dataset.global_batch_size // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        yield context.problem(
            path,
            f"must be a multiple of {unit} = micro-batch size {dataset.batch_size} * data parallel size "
            f"{size or 'N (at least 1)'}; nearest: {nearest}",
            f"{_D}.batch_size",
        )
    elif size and context.was_set(f"{_D}.micro_batch_num") and dataset.global_batch_size != unit * dataset.micro_batch_num:
        yield context.problem(
            path,
            f"contradicts micro_batch_num: {unit} * {dataset.micro_batch_num} = {unit * dataset.micro_batch_num}; "
            "give one of them",
            f"{_D}.micro_batch_num",
        )


@rule
def ramp_up_fits(context):
    """Refuse a `rampup_batch_size` that is not three numbers leading to the global batch size."""
    ramp, dataset = context.dataset.rampup_batch_size, context.dataset
    path = f"{_D}.rampup_batch_size"
    if ramp is None:
        return
    if len(ramp) != 3 or min(ramp[:2], default=0) <= 0 or ramp[-1] < 0:
        yield context.problem(path, "expects three numbers: start batch, increment, samples")
        return
    if dataset.global_batch_size is None:
        yield context.problem(path, "needs global_batch_size, at which it ends")
        return
    start, step, _ = ramp
    if start > dataset.global_batch_size or (dataset.global_batch_size - start) % step:
        yield context.problem(path, "must reach global_batch_size in whole steps", f"{_D}.global_batch_size")
    unit = dataset.batch_size * (context.data_parallel_size or 1)
    if not dataset.decrease_batch_size_if_needed and (start % unit or step % unit):
        wrong = [size for size in ramp_up_sizes(dataset) if size % unit] or [start]
        yield context.problem(
            path,
            f"expects start and increment to be multiples of {unit} = micro-batch size * data parallel size, but goes "
            f"through {', '.join(map(str, wrong[:4]))}; or set decrease_batch_size_if_needed",
            f"{_D}.batch_size",
        )


@rule
def samples_fill_a_batch(context):
    """Refuse a `train_samples` below the first global batch."""
    dataset, path = context.dataset, f"{_D}.train_samples"
    sizes = ramp_up_sizes(dataset) or [dataset.global_batch_size]
    if not context.training.training_iters and dataset.train_samples and (sizes[0] or 0) > dataset.train_samples:
        other = "rampup_batch_size" if dataset.rampup_batch_size else "global_batch_size"
        if not dataset.decrease_batch_size_if_needed:
            yield context.problem(path, f"is less than the first global batch, {sizes[0]}", f"{_D}.{other}")


@rule
def length_is_clear(context):
    """Refuse `training_iters` together with `train_samples` or a batch-size ramp-up."""
    if context.training.training_iters and context.dataset.train_samples:
        yield context.problem(f"{_T}.training_iters", "and train_samples both give the length; keep one", f"{_D}.train_samples")
    if context.dataset.rampup_batch_size and context.training.training_iters:
        yield context.problem(
            f"{_D}.rampup_batch_size", "needs train_samples, since steps differ in size", f"{_T}.training_iters"
        )


@rule
def one_half_type(context):
    """Refuse fp16 together with bf16, and a `compute_dtype` or `params_dtype` that contradicts the one given."""
    training, model = context.training, context.model
    if training.fp16 and training.bf16:
        yield context.problem(f"{_T}.fp16", "and bf16 cannot be on together; keep one", f"{_T}.bf16")
        return
    half = "bfloat16" if training.bf16 else "float16" if training.fp16 else None
    if not model or not half:
        return
    switch = f"{_T}.{'bf16' if training.bf16 else 'fp16'}"
    if model.compute_dtype != half:
        yield context.problem(
            "model_config.compute_dtype", f"contradicts the switch; expects {half}, or switch that off", switch
        )
    if model.params_dtype not in (half, "float32"):
        yield context.problem("model_config.params_dtype", f"contradicts the switch; expects {half} or float32", switch)


@rule
def half_switches_need_half(context):
    """Refuse half-precision switches, such as `fp16_lm_cross_entropy`, that `compute_dtype` contradicts."""
    model = context.model
    if not model:
        return
    if model.fp16_lm_cross_entropy and model.compute_dtype != "float16":
        yield context.problem("model_config.fp16_lm_cross_entropy", "needs float16 computation", "model_config.compute_dtype")
    if (
        model.fp32_residual_connection
        and model.compute_dtype == "float32"
        and context.was_set("model_config.fp32_residual_connection")
    ):
        yield context.problem(
            "model_config.fp32_residual_connection",
            "needs fp16 or bf16; in fp32 the residual is fp32 already",
            "model_config.compute_dtype",
        )
    if model.attention_softmax_in_fp32 != (model.softmax_compute_dtype == "float32") and (
        model.attention_softmax_in_fp32 or model.compute_dtype != "float32"
    ):
        yield context.problem(
            "model_config.softmax_compute_dtype",
            "contradicts attention_softmax_in_fp32; keep one",
            "model_config.attention_softmax_in_fp32",
        )
    if model.residual_connection_dtype not in ("float32", model.compute_dtype):
        yield context.problem(
            "model_config.residual_connection_dtype", "expects float32 or compute_dtype", "model_config.compute_dtype"
        )


@rule
def loss_scale_triple(context):
    """Refuse a part of `loss_scale_value`, `_factor` and `_window` without the rest, and values out of range."""
    missing = [name for name in LOSS_SCALE if context.training[name] is None]
    if missing and len(missing) < len(LOSS_SCALE):
        present = next(name for name in LOSS_SCALE if name not in missing)
        yield context.problem(f"{_T}.{present}", f"must be set together with {' and '.join(missing)}")
        return
    if context.training.loss_scale_factor <= 1:
        yield context.problem(f"{_T}.loss_scale_factor", "expects a number > 1: the scale grows and shrinks by it")
    if context.training.dynamic_loss_scale and context.training.min_loss_scale > context.training.loss_scale_value:
        yield context.problem(f"{_T}.min_loss_scale", "must not be above the loss scale at the start", f"{_T}.loss_scale_value")


@rule
def mean_over_tokens_is_taken_last(context):
    """Refuse `average_in_collective` together with `calculate_per_token_loss`."""
    if context.training.calculate_per_token_loss and context.training.average_in_collective:
        yield context.problem(
            f"{_T}.average_in_collective",
            "contradicts calculate_per_token_loss, where sums are reduced and divided by the tokens of the step; keep one",
            f"{_T}.calculate_per_token_loss",
        )


@rule
def gradients_in_one_type(context):
    """Refuse contradicting gradient dtypes; notice if bf16 gradients are accumulated in bf16."""
    training = context.training
    if training.grad_reduce_in_bf16 and training.accumulate_allreduce_grads_in_fp32:
        yield context.problem(
            f"{_T}.grad_reduce_in_bf16",
            "contradicts accumulate_allreduce_grads_in_fp32; keep one",
            f"{_T}.accumulate_allreduce_grads_in_fp32",
        )
    low = context.model is not None and context.model.params_dtype == "bfloat16"
    if training.grad_reduce_in_bf16 and context.model is not None and not low:
        yield context.problem(
            f"{_T}.grad_reduce_in_bf16", "needs bf16: gradients have the type of the parameters", f"{_T}.bf16"
        )
    if low and not training.accumulate_allreduce_grads_in_fp32 and not training.grad_reduce_in_bf16:
        context.notice(
            "accumulate_allreduce_grads_in_fp32 is False: gradients of bf16 parameters are summed in bf16; "
            "Megatron sums them in fp32 (set it to True for that)"
        )


@rule
def reduction_needs_ddp(context):
    """Refuse switches of the data parallel wrapper without `wrap_with_ddp`."""
    asked = context.ddp_switches
    if asked and not context.training.wrap_with_ddp:
        yield context.problem(f"{_T}.{asked[0]}", "needs wrap_with_ddp", f"{_T}.wrap_with_ddp")


@rule
def overlaps_need_their_base(context):
    """Refuse `delay_grad_reduce` and `overlap_param_gather` without the options they extend."""
    training, optimizer = context.training, context.optimizer
    if training.delay_grad_reduce and not training.overlap_grad_reduce:
        yield context.problem(f"{_T}.delay_grad_reduce", "needs overlap_grad_reduce", f"{_T}.overlap_grad_reduce")
    sharded = training.use_distributed_optimizer or context.parallel.zero_level
    if optimizer.overlap_param_gather and not sharded:
        yield context.problem(
            f"{_O}.overlap_param_gather", "needs use_distributed_optimizer or zero_level", f"{_T}.use_distributed_optimizer"
        )
    if optimizer.overlap_param_gather_with_optimizer_step and not optimizer.overlap_param_gather:
        yield context.problem(
            f"{_O}.overlap_param_gather_with_optimizer_step", "needs overlap_param_gather", f"{_O}.overlap_param_gather"
        )


@rule
def zero_settings_fit(context):
    """Refuse `zero_shard_size` and `zero_config` that do not fit the ZeRO level."""
    parallel, size = context.parallel, context.data_parallel_size
    path = f"{_P}.zero_shard_size"
    if parallel.zero_shard_size:
        if not parallel.zero_level and not context.training.use_distributed_optimizer:
            yield context.problem(path, "needs zero_level", f"{_P}.zero_level")
        if size and size % parallel.zero_shard_size:
            yield context.problem(path, f"must divide the data parallel size {size}")
    zero, level, path = context.optimizer.zero_config, parallel.zero_level, f"{_O}.zero_config"
    if zero is None:
        return
    if not level:
        named = next((f"{path}.{name}" for name in sorted(zero.model_fields_set)), path)
        yield context.problem(named, "needs zero_level", f"{_P}.zero_level")
    elif level != "z3":
        for name in ("param_resident", "unit_modules"):
            if zero[name]:
                yield context.problem(f"{path}.{name}", "needs zero_level z3", f"{_P}.zero_level")
    if zero.allreduce_after_grad_accumulation and level == "z1":
        yield context.problem(
            f"{path}.allreduce_after_grad_accumulation", "needs zero_level z2 or z3; z1 always does so", f"{_P}.zero_level"
        )


@rule
def resume_has_a_path(context):
    """Refuse `resume_training` without a folder or with `finetune`."""
    training, path = context.training, f"{_T}.resume_training"
    if training.resume_training and not training.load_checkpoint and not training.output_dir:
        yield context.problem(path, "needs load_checkpoint (--load) or output_dir (--save)")
    if training.resume_training and training.finetune:
        yield context.problem(path, "contradicts finetune, which starts at iteration 0; keep one", f"{_T}.finetune")
    if training.exit_on_missing_checkpoint and not training.load_checkpoint and not training.resume_training:
        yield context.problem(f"{_T}.exit_on_missing_checkpoint", "needs load_checkpoint (--load)")


@rule
def prefix_is_a_file_name(context):
    """Refuse a `prefix` that is no beginning of a file name."""
    prefix = context.training.prefix
    if not prefix or "/" in prefix or "\0" in prefix or prefix.startswith("."):
        yield context.problem(f"{_T}.prefix", "expects the beginning of a file name: not empty, no '/', no '.' in front")


@rule
def best_checkpoint_is_defined(context):
    """Refuse `best_metric_comparison` without evaluations and a metric."""
    training = context.training
    if training.best_metric_comparison and not training.eval_interval:
        yield context.problem(f"{_T}.best_metric_comparison", "needs eval_interval")
    if training.best_metric_comparison and not training.eval_metric:
        yield context.problem(f"{_T}.best_metric_comparison", "needs eval_metric")


@rule
def split_is_numbers(context):
    """Refuse a `split` that is not up to three shares."""
    split = context.dataset.split
    if split is None:
        return
    words = split.replace("/", ",").split(",")
    try:
        shares = [float(word) for word in words]
    except ValueError:
        yield context.problem(f"{_D}.split", "expects up to three numbers joined by commas, such as 949,50,1")
        return
    if len(shares) > 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) <= 0:
        yield context.problem(f"{_D}.split", "expects up to three numbers from 0, at least one above 0, such as 949,50,1")


@rule
def data_sources_fit(context):
    """Refuse data named in several ways, and weights that are no positive numbers."""
    dataset = context.dataset
    each = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if dataset[name]]
    if dataset.data_path and each:
        yield context.problem(f"{_D}.data_path", f"and {each[0]} both name the data; keep one way", f"{_D}.{each[0]}")
    if dataset.mock_data and (dataset.data_path or each):
        yield context.problem(f"{_D}.mock_data", "and files both name the data; keep one way")
    if dataset.split and each:
        yield context.problem(f"{_D}.split", f"has no effect with {each[0]}; leave it out")
    for name in ("data_path", *each):
        yield from _weights(context, f"{_D}.{name}", dataset[name] or [])


def _weights(context, path, words):
    if len(words) < 2 or not _is_number(words[0]):
        return
    weights = words[0::2]
    if len(words) % 2 or not all(_is_number(weight) for weight in weights):
        yield context.problem(path, "expects pairs of weight and prefix: 0.3 first 0.7 second")
    elif not all(0 < float(weight) < math.inf for weight in weights):
        yield context.problem(path, "expects weights above 0")


def _is_number(word):
    try:
        float(word)
    except ValueError:
        return False
    return not os.path.exists(word)
