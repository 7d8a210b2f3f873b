"""Rows of ``optimizer_config``."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import LIST, ignored, refused, row, yaml_only

_HOST_STATE = (
    "on CPU the optimizer's state is in the host's memory in any case; on Ascend a start refuses it",
    "CPU上优化器状态总在主机内存；Ascend上启动时会拒绝",
)


def _optimizer(name, field=None, **details):
    return row(name, f"optimizer_config.{field or name}", **details)


ROWS = (
    _optimizer("optimizer", "optimizer_type", also=("--optimizer-type",), megatron="adam", seen="optimizer"),
    row(
        "adam_beta1",
        "optimizer_config.betas",
        convert=conversions.beta(0),
        megatron=None,
        seen="optimizer",
        english="Decay rate of Adam's first moment (default 0.9).",
        chinese="Adam一阶矩的衰减率（默认0.9）。",
    ),
    row(
        "adam_beta2",
        "optimizer_config.betas",
        convert=conversions.beta(1),
        megatron=None,
        seen="optimizer",
        english="Decay rate of Adam's second moment (default 0.999).",
        chinese="Adam二阶矩的衰减率（默认0.999）。",
    ),
    _optimizer("betas", form=LIST, seen="optimizer"),
    _optimizer("adam_eps", "eps", also=("--eps",), seen="optimizer"),
    _optimizer("sgd_momentum", seen="optimizer"),
    _optimizer("lr", "learning_rate", also=("--learning-rate",), megatron=None, seen="lr"),
    _optimizer("decoupled_lr", seen="lr"),
    _optimizer("decoupled_min_lr", seen="lr"),
    _optimizer("min_lr", seen="lr"),
    _optimizer("lr_decay_style", megatron="linear", seen="lr"),
    _optimizer("lr_decay_iters", seen="lr"),
    _optimizer("lr_decay_samples", seen="lr"),
    _optimizer("lr_warmup_iters", seen="lr"),
    _optimizer("lr_warmup_samples", seen="lr"),
    _optimizer("lr_warmup_fraction", seen="lr"),
    _optimizer("lr_warmup_init", seen="lr"),
    _optimizer("lr_wsd_decay_style", megatron="exponential", needs=("lr_decay_style=WSD",), seen="lr"),
    _optimizer("lr_wsd_decay_iters", seen="lr"),
    _optimizer("lr_wsd_decay_samples", seen="lr"),
    yaml_only(
        "optimizer_config.learning_rate_scheduler_kwargs",
        seen="error",
        **refused("use lr_decay_style and the lr_ settings", "请使用lr_decay_style及lr_各项"),
    ),
    _optimizer(
        "use_checkpoint_opt_param_scheduler",
        flag="--use-checkpoint-opt_param-scheduler",
        also=("--use-checkpoint-opt-param-scheduler",),
        megatron=False,
        seen="lr",
    ),
    _optimizer(
        "override_opt_param_scheduler",
        flag="--override-opt_param-scheduler",
        also=("--override-opt-param-scheduler",),
        seen="lr",
    ),
    _optimizer("weight_decay", megatron=0.01, seen="optimizer"),
    _optimizer("start_weight_decay", seen="optimizer"),
    _optimizer("end_weight_decay", seen="optimizer"),
    _optimizer("weight_decay_incr_style", seen="optimizer"),
    yaml_only(
        "optimizer_config.weight_decay_kwargs",
        seen="error",
        **refused(
            "use weight_decay, start_weight_decay, end_weight_decay", "请使用weight_decay、start_weight_decay、end_weight_decay"
        ),
    ),
    _optimizer("no_weight_decay_params", form=LIST, seen="optimizer"),
    _optimizer("clip_grad", megatron=1.0, seen="optimizer"),
    _optimizer("clip_grad_type", seen="optimizer"),
    _optimizer("overlap_param_gather", seen="operators"),
    _optimizer("overlap_param_gather_with_optimizer_step", seen="operators"),
    yaml_only("optimizer_config.zero_config.param_resident", seen="memory"),
    yaml_only("optimizer_config.zero_config.allreduce_after_grad_accumulation", seen="operators"),
    yaml_only("optimizer_config.zero_config.grad_allreduce_op", seen="optimizer"),
    yaml_only(
        "optimizer_config.zero_config.opt_parallel_group",
        seen="error",
        **refused("use parallel_config.zero_shard_size", "请使用parallel_config.zero_shard_size"),
    ),
    yaml_only("optimizer_config.zero_config.cpu_offload", seen="log", **ignored(*_HOST_STATE)),
    _optimizer("optimizer_cpu_offload", also=("--swap-optimizer",), seen="log", **ignored(*_HOST_STATE)),
    _optimizer(
        "use_precision_aware_optimizer", seen="error", **refused("optimizer state is kept in fp32", "优化器状态以fp32保存")
    ),
    _optimizer("reuse_fp32_param", seen="memory"),
)
