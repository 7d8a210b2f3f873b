"""Parts of ``training_config`` and ``optimizer_config`` that are mappings of their own: clipping, loss function, ZeRO."""

from typing import ClassVar

from mindspeed_ms.config.sections.base import Section, field
from mindspeed_ms.config.values import Bool, NotNegative, Str, one_of

CLIP_TYPES = ("ClipGlobalNorm", "GradClipByValue")
LOSS_FUNCTIONS = ("VocabParallelCrossEntropy",)


class GradClipConfig(Section):
    """``training_config.grad_clip_kwargs``, and the long form of ``optimizer_config.clip_grad``."""

    config_name: ClassVar[str] = "grad_clip_kwargs"

    grad_clip_type: one_of(*CLIP_TYPES) = field(
        "ClipGlobalNorm", "What is limited: the global norm, or each element.", "限制的对象：全局范数或每个元素。"
    )
    clip_value: NotNegative = field(..., "The limit; 0 for none.", "上限，0表示不裁剪。")


class LossFunctionConfig(Section):
    """``training_config.loss_func_kwargs``."""

    config_name: ClassVar[str] = "loss_func_kwargs"

    loss_func_type: one_of(*LOSS_FUNCTIONS) = field(LOSS_FUNCTIONS[0], "Loss function.", "损失函数。")


class ZeroConfig(Section):
    """``optimizer_config.zero_config``: details of the ZeRO level that ``parallel_config.zero_level`` chooses."""

    config_name: ClassVar[str] = "zero_config"

    param_resident: Bool = field(
        False, "z3: keep layers in full between forward and backward.", "z3：前向与反向之间保留完整的层。"
    )
    allreduce_after_grad_accumulation: Bool = field(
        False, "z2, z3: reduce once a step, not after each micro-batch.", "z2、z3：每步规约一次，而不是每个微批之后。"
    )
    grad_allreduce_op: one_of("mean", "sum") = field(
        "mean", "Gradients are averaged or summed over data parallel ranks.", "数据并行rank间梯度取平均或求和。"
    )
    opt_parallel_group: Str | None = field(None, "Upstream's name of the sharding group.", "上游的切分组名称。")
    cpu_offload: Bool = field(False, "Keep optimizer state on the host.", "优化器状态放在主机内存。")
