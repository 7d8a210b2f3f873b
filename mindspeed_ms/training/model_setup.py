"""Model chunks, optimizer and schedule of a configuration: `get_model`, `get_optimizer`, `get_optimizer_param_scheduler`."""

from functools import partial

from mindspore import nn

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.config.sections.optimizer import ZeroConfig
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from mindspeed_ms.core.tensor_parallel.cell import deferred_initialization, description_of, global_name, initialize_parameters
from mindspeed_ms.core.tensor_parallel.lora import add_adapters
from mindspeed_ms.training.data import global_batch_size


def get_model(model_provider_func, all_config, transforms=(), wrap=DistributedDataParallel, initialize=initialize_parameters):
    """Build this rank's model chunks, initialise their parameters by global name and wrap them for data parallelism.

    Args:
        model_provider_func (Callable): `(pre_process, post_process) -> nn.Cell`; called once per chunk.
        all_config (AllConfig): read: training_config for the buffers, sizes for the pipeline.
        transforms (sequence[Callable]): each `(nn.Cell) -> nn.Cell` changes a chunk before its parameters are
            initialised, after the adapters of `lora_config` were added.
        wrap (Callable): the data-parallel wrapper: `(ModelDescription, DistributedDataParallelConfig, nn.Cell,
            disable_bucketing=bool) -> ShardedModel`.
        initialize (Callable): fills the parameters of a chunk: `(nn.Cell)`.

    Returns:
        list[ShardedModel]: one per chunk of this rank's pipeline stage.
    """
    adapts = partial(add_adapters, describe_model(all_config))
    cells = _build_chunks(model_provider_func, (adapts, *transforms), initialize)
    _refuse_equal_names(cells)
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        parameters = sum(param.size for cell in cells for param in cell.get_parameters())
        logger.info("parameters on %s: %d", _place(), parameters)
    later_stage = not parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    delayed = all_config.training_config.delay_grad_reduce and later_stage
    description, ddp_config = describe_model(all_config), get_ddp_config(all_config)
    # the reduction of later chunks overlaps with the backward of earlier ones as it is
    return [wrap(description, ddp_config, cell, disable_bucketing=delayed or chunk > 0) for chunk, cell in enumerate(cells)]


def _build_chunks(model_provider_func, transforms, initialize):
    """The cells of this stage's chunks, each built while `parallel_state` answers for it."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    cells = []
    for chunk in range(chunks or 1):
        if chunks is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(),
            "post_process": parallel_state.is_pipeline_last_stage(),
        }
        with deferred_initialization():
            cell = _checked_cell(model_provider_func(**ends), "model_provider_func")
            for transform in transforms:
                cell = _checked_cell(transform(cell), f"the transform {getattr(transform, '__name__', transform)}")
        initialize(cell)
        cells.append(cell)
    if chunks is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    return cells


def _refuse_equal_names(cells):
    """Refuse a parameter name that two chunks of the pipeline have: initial values and checkpoints are keyed by names."""
    group = parallel_state.get_pipeline_model_parallel_group()
    named = ((name, param, description_of(param)) for cell in cells for name, param in cell.parameters_and_names())
    own = [global_name(name, param) for name, param, about in named if not about.shared and about.shared_with is None]
    places = {}
    for stage, names in enumerate(group.all_gather_object(own) if group.size > 1 else [own]):
        for name in names:
            places.setdefault(name, []).append(stage)
    twice = {name: stages for name, stages in places.items() if len(stages) > 1}
    if twice:
        name, stages = next(iter(twice.items()))
        raise ValueError(
            f"{len(twice)} parameters have a name that another chunk of the pipeline has too, such as {name!r} on the stages "
            f"{', '.join(map(str, stages))}: their values could not be told apart in a checkpoint. Give each a name of its "
            "own in the whole model: name the cells by their global number, or call "
            "mindspeed_ms.core.tensor_parallel.cell.place_globally(cell, global name, local name)."
        )


def _checked_cell(cell, source):
    if not isinstance(cell, nn.Cell):
        raise ValueError(f"{source} returned a {type(cell).__name__}: expected a mindspore.nn.Cell.")
    return cell


def _place():
    text = f"tensor-parallel rank {parallel_state.get_tensor_model_parallel_rank()}"
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return text
    return f"{text} of pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}"


def get_ddp_config(all_config):
    """`DistributedDataParallelConfig` of an AllConfig."""
    training, zero = all_config.training_config, all_config.optimizer_config.zero_config or ZeroConfig()
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=training.overlap_grad_reduce,
        use_distributed_optimizer=training.use_distributed_optimizer,
        bucket_size=training.bucket_size,
        average_in_collective=training.average_in_collective,
        check_for_nan_in_grad=training.check_for_nan_in_grad,
        enable_mem_align=training.enable_mem_align,
        overlap_param_gather=all_config.optimizer_config.overlap_param_gather,
        zero_level=all_config.parallel_config.zero_level,
        zero_shard_size=all_config.parallel_config.zero_shard_size,
        allreduce_after_grad_accumulation=zero.allreduce_after_grad_accumulation,
        param_resident=zero.param_resident,
        unit_modules=zero.unit_modules,
        calculate_per_token_loss=training.calculate_per_token_loss,
        gradient_accumulation_fusion=all_config.parallel_config.gradient_accumulation_fusion,
        sum_gradients=zero.grad_allreduce_op == "sum",
    )


def get_optimizer_config(all_config):
    """`OptimizerConfig` (Megatron core's names) of an AllConfig."""
    optimizer, training = all_config.optimizer_config, all_config.training_config
    zero = optimizer.zero_config or ZeroConfig()
    return OptimizerConfig(
        optimizer=optimizer.optimizer_type,
        lr=optimizer.learning_rate,
        min_lr=optimizer.min_lr,
        decoupled_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
        weight_decay=optimizer.weight_decay,
        no_weight_decay_params=optimizer.no_weight_decay_params or None,
        fp16=training.fp16,
        bf16=training.bf16,
        loss_scale=training.loss_scale,
        initial_loss_scale=training.loss_scale_value,
        min_loss_scale=training.min_loss_scale,
        loss_scale_factor=training.loss_scale_factor,
        loss_scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        sgd_momentum=optimizer.sgd_momentum,
        clip_grad=optimizer.clip_grad,
        grad_clip_type=optimizer.clip_grad_type,
        log_num_zeros_in_grad=training.log_num_zeros_in_grad,
        cpu_offload=optimizer.optimizer_cpu_offload or zero.cpu_offload,
    )


def get_optimizer(all_config, model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    """Optimizer of model chunks; see `get_megatron_optimizer`. LoRA+ scales the rate of B matrices, unless `scale_lr_cond` is
    given."""
    ratio = all_config.lora_config.lora_plus_ratio
    if scale_lr_cond is None and all_config.lora_config.use_lora and ratio != 1.0:
        scale_lr_cond, lr_mult = (lambda name, param: name.endswith(".lora_b")), ratio
    return get_megatron_optimizer(get_optimizer_config(all_config), model, no_weight_decay_cond, scale_lr_cond, lr_mult)


def get_optimizer_param_scheduler(optimizer, all_config, training_iters):
    """`OptimizerParamScheduler` of a run.

    A run whose length is `train_samples` takes that as its length, not the samples of its whole batches: Megatron's rule.

    Args:
        optimizer (MegatronOptimizer): whose groups it sets.
        all_config (AllConfig): optimizer_config, the batch sizes and the length of the run.
        training_iters (int): steps of the run.
    """
    batch, train_samples = global_batch_size(all_config), all_config.dataset_config.train_samples
    by_samples = train_samples and not all_config.training_config.training_iters
    length = train_samples if by_samples else training_iters * batch
    return OptimizerParamScheduler.from_config(optimizer, all_config.optimizer_config, batch, length)
