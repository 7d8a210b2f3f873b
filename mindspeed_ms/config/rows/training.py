"""Rows of ``training_config``, without checkpoints and profiling."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import OFF, ON, SWITCH, ignored, row, yaml_only

_NO_GRAPH = ("nothing is compiled to graphs here", "本框架不编译图")
_SCALING = ("fp16", "initial_loss_scale", "loss_scale_factor", "loss_scale_window")


def _training(name, field=None, **details):
    return row(name, f"training_config.{field or name}", **details)


ROWS = (
    _training("seed", megatron=1234, seen="output"),
    _training("train_iters", "training_iters", also=("--training-iters",), seen="log"),
    _training("epochs", seen="log"),
    _training("log_interval", megatron=100, seen="log"),
    _training("eval_interval", megatron=1000, seen="log"),
    _training("eval_iters", seen="log"),
    _training("best_metric_comparison", seen="file"),
    _training("eval_metric", seen="file"),
    _training("exit_interval", seen="log"),
    _training("exit_duration_in_mins", seen="log"),
    _training(
        "exit_signal_handler",
        megatron=False,
        convert=conversions.only_typed("training_config.exit_signal_handler"),
        seen="file",
    ),
    _training("skip_train", seen="log"),
    _training("fp16", seen="output"),
    _training("bf16", seen="output", convert=conversions.bf16),
    _training("loss_scale", seen="log"),
    _training(
        "initial_loss_scale", "loss_scale_value", also=("--loss-scale-value",), megatron=2.0**32, needs=_SCALING, seen="log"
    ),
    _training("loss_scale_factor", megatron=2.0, needs=_SCALING, seen="log"),
    _training("loss_scale_window", megatron=1000, needs=_SCALING, seen="log"),
    _training("min_loss_scale", seen="log"),
    _training(
        "hysteresis",
        seen="log",
        reason="upstream maps it to the growth factor; here it is Megatron's hysteresis, loss_scale_factor is the factor",
        reason_zh="上游误映射为缩放倍数；此处为Megatron的hysteresis，倍数为loss_scale_factor",
    ),
    _training("loss_reduction", seen="optimizer"),
    _training("calculate_per_token_loss", seen="optimizer"),
    yaml_only("training_config.loss_func_kwargs.loss_func_type", seen="error"),
    yaml_only("training_config.grad_clip_kwargs.grad_clip_type", seen="optimizer"),
    yaml_only("training_config.grad_clip_kwargs.clip_value", seen="optimizer"),
    _training(
        "wrap_with_ddp",
        megatron=True,
        seen="error",
        reason="gradients are kept in buffers and reduced over data parallel ranks in any case; False refuses the "
        "settings that belong to the wrapper",
        reason_zh="梯度总是存放在缓冲区并在数据并行rank间规约；False会拒绝属于该包装的设置",
    ),
    _training("use_distributed_optimizer", seen="memory"),
    _training("accumulate_allreduce_grads_in_fp32", seen="memory"),
    _training("grad_reduce_in_bf16", seen="log"),
    _training("overlap_grad_reduce", seen="operators"),
    _training("delay_grad_reduce", seen="operators"),
    _training("average_in_collective", also=("--ddp-average-in-collective",), seen="operators"),
    _training("bucket_size", also=("--ddp-bucket-size",), seen="operators"),
    _training("enable_mem_align", off="--disable-mem-align", seen="memory"),
    _training("check_for_nan_in_grad", form=ON, seen="error"),
    _training("check_for_nan_in_loss", form=ON, seen="error"),
    row(
        "check_for_nan_in_loss_and_grad",
        "training_config.check_for_nan_in_loss",
        form=OFF,
        convert=conversions.check_for_nan,
        megatron=True,
        seen="error",
        english="Stop if loss or gradient is not finite.",
        chinese="损失或梯度非有限时停止。",
    ),
    _training("check_weight_hash_across_dp_replicas_interval", seen="error"),
    _training(
        "empty_unused_memory_level",
        seen="log",
        **ignored("MindSpore's memory pool reuses what is free by itself", "MindSpore内存池会自行复用空闲内存"),
    ),
    _training("manual_gc", seen="memory"),
    _training("manual_gc_interval", seen="memory"),
    _training("enable_compile_cache", form=SWITCH, seen="log", **ignored(*_NO_GRAPH)),
    _training("compile_cache_path", seen="log", **ignored(*_NO_GRAPH)),
    _training("log_throughput", seen="log"),
    _training("log_num_zeros_in_grad", seen="log"),
    _training("log_params_norm", seen="log"),
    _training("log_loss_scale_to_tensorboard", form=OFF, seen="file"),
    _training("log_learning_rate_to_tensorboard", form=OFF, seen="file"),
    _training("log_timers_to_tensorboard", seen="file"),
    _training("log_batch_size_to_tensorboard", seen="file"),
    _training("log_memory_to_tensorboard", seen="file"),
    _training("log_validation_ppl_to_tensorboard", seen="file"),
    _training("tensorboard_dir", seen="file"),
    _training("tensorboard_log_interval", seen="file"),
    _training("tensorboard_queue_size", seen="file"),
    _training("log_level", seen="log"),
    row(
        "logging_level",
        "training_config.log_level",
        convert=conversions.logging_level,
        megatron=None,
        seen="log",
        english="Python's number of the log level (20 is info).",
        chinese="Python日志级别的数值（20为info）。",
    ),
    _training("device", "device_target", also=("--device-target",), seen="operators"),
)
