"""`optimizer_config`: names of the optimizers (`OPTIMIZERS`), learning rate, weight decay, clipping, details of ZeRO."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.errors import ConfigError
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, VALUE, YAML_ONLY, Alias, field, link
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.values import (
    Bool,
    Count,
    FloatList,
    NotNegative,
    PositiveFloat,
    PositiveInt,
    Str,
    StrList,
    number,
    one_of,
)

_HOST_STATE = (
    "on CPU the optimizer's state is in the host's memory in any case; on Ascend a start refuses it",
    "CPU上优化器状态总在主机内存；Ascend上启动时会拒绝",
)
ADAM = "adamw.AdamW"
OPTIMIZERS = {  # module and class in core.optimizer -> names in a configuration
    ADAM: ("AdamWeightDecay", "adam", "Adam", "AdamW", "mint.AdamW", "SpeedAdamW", "AdamWZeRO"),
    "sgd.SGD": ("sgd", "SGD"),
}
CLIP_TYPES = ("ClipGlobalNorm", "GradClipByValue")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


class GradClipConfig(Section):
    """`training_config.grad_clip_kwargs`, and the long form of `optimizer_config.clip_grad`."""

    config_name: ClassVar[str] = "grad_clip_kwargs"

    grad_clip_type: one_of(*CLIP_TYPES) = field(
        "ClipGlobalNorm", "What is limited: the global norm, or each element.", "限制的对象：全局范数或每个元素。", "optimizer"
    )
    clip_value: NotNegative = field(..., "The limit; 0 for none.", "上限，0表示不裁剪。", "optimizer")


class ZeroConfig(Section):
    """`optimizer_config.zero_config`: details of the ZeRO level that `parallel_config.zero_level` chooses."""

    config_name: ClassVar[str] = "zero_config"

    param_resident: Bool = field(
        False, "z3: keep layers in full between forward and backward.", "z3：前向与反向之间保留完整的层。", "memory"
    )
    allreduce_after_grad_accumulation: Bool = field(
        False,
        "z2, z3: reduce once a step, not after each micro-batch.",
        "z2、z3：每步规约一次，而不是每个微批之后。",
        "operators",
    )
    unit_modules: StrList | None = field(
        None,
        "z3: cells gathered and released as one, names with wildcards; default: layers of lists of layers.",
        "z3：作为一个整体聚合和释放的cell，名称可用通配符；默认为层列表中的各层。",
        "memory",
    )
    grad_allreduce_op: one_of("mean", "sum") = field(
        "mean", "Gradients are averaged or summed over data parallel ranks.", "数据并行rank间梯度取平均或求和。", "optimizer"
    )
    opt_parallel_group: Str | None = field(
        None,
        "Upstream's name of the sharding group.",
        "上游的切分组名称。",
        "error",
        refused=("use parallel_config.zero_shard_size", "请使用parallel_config.zero_shard_size"),
    )
    cpu_offload: Bool = field(
        False, "Keep optimizer state on the host.", "优化器状态放在主机内存。", "log", ignored=_HOST_STATE
    )


class OptimizerConfig(Section):
    """`optimizer_config`: optimizer and its schedules. `OptimizerConfig(parallel_config, **fields)`."""

    config_name: ClassVar[str] = "optimizer_config"

    optimizer_type: one_of(*(name for names in OPTIMIZERS.values() for name in names)) = field(
        "AdamWeightDecay",
        "Optimizer; all Adam names are Megatron's AdamW.",
        "优化器；所有Adam名称都是Megatron的AdamW。",
        "optimizer",
        name="optimizer",
        also=("--optimizer-type",),
        megatron="adam",
        yaml_names=("optimizer",),
    )
    betas: FloatList = field(
        [0.9, 0.999],
        "Adam's decay rates of the two moments.",
        "Adam一阶、二阶矩的衰减率。",
        "optimizer",
        form=LIST,
        aliases=(
            Alias(
                "adam_beta1",
                "Decay rate of Adam's first moment (default 0.9).",
                "Adam一阶矩的衰减率（默认0.9）。",
                convert=conversions.beta(0),
                form=VALUE,
            ),
            Alias(
                "adam_beta2",
                "Decay rate of Adam's second moment (default 0.999).",
                "Adam二阶矩的衰减率（默认0.999）。",
                convert=conversions.beta(1),
                form=VALUE,
            ),
        ),
    )
    eps: PositiveFloat = field(
        1e-08,
        "Adam's epsilon, outside the root.",
        "Adam的epsilon，位于根号之外。",
        "optimizer",
        name="adam_eps",
        also=("--eps",),
        yaml_names=("adam_eps",),
    )
    sgd_momentum: number(ge=0, lt=1) = field(0.9, "Momentum of SGD.", "SGD的动量。", "optimizer")
    learning_rate: PositiveFloat = field(
        0.001,
        "Highest learning rate.",
        "最大学习率。",
        "lr",
        name="lr",
        also=("--learning-rate",),
        megatron=None,
        yaml_names=("lr",),
    )
    decoupled_lr: PositiveFloat | None = field(None, "Learning rate of embedding and head.", "词嵌入和输出头的学习率。", "lr")
    decoupled_min_lr: NotNegative | None = field(
        None, "Lowest learning rate of embedding and head.", "词嵌入和输出头的最小学习率。", "lr"
    )
    min_lr: NotNegative = field(0.0, "Lowest learning rate after decay.", "衰减后的最小学习率。", "lr")
    lr_decay_style: one_of(*LR_DECAY_STYLES) = field(
        "constant", "Shape of the decay.", "学习率衰减方式。", "lr", megatron="linear"
    )
    lr_decay_iters: PositiveInt | None = field(
        None, "Steps over which it decays; null takes all.", "衰减的步数，空表示全程。", "lr"
    )
    lr_decay_samples: PositiveInt | None = field(None, "Samples over which it decays.", "衰减的样本数。", "lr")
    lr_warmup_iters: Count = field(0, "Steps of linear warm-up.", "线性预热的步数。", "lr")
    lr_warmup_samples: Count = field(0, "Samples of linear warm-up.", "线性预热的样本数。", "lr")
    lr_warmup_fraction: number(ge=0, le=1) | None = field(
        None, "Warm-up as a share of the decay.", "预热占衰减长度的比例。", "lr"
    )
    lr_warmup_init: NotNegative = field(0.0, "Learning rate at the start of the warm-up.", "预热起点的学习率。", "lr")
    lr_wsd_decay_style: one_of(*WSD_DECAY_STYLES) = field(
        "linear",
        "Shape of the last part of WSD.",
        "WSD末段的衰减方式。",
        "lr",
        megatron="exponential",
        needs=("lr_decay_style=WSD",),
    )
    lr_wsd_decay_iters: PositiveInt | None = field(None, "Steps of the last part of WSD.", "WSD末段的步数。", "lr")
    lr_wsd_decay_samples: PositiveInt | None = field(None, "Samples of the last part of WSD.", "WSD末段的样本数。", "lr")
    learning_rate_scheduler_kwargs: dict | None = field(
        None,
        "Upstream's older schedulers.",
        "上游的旧调度器。",
        "error",
        name=YAML_ONLY,
        refused=("use lr_decay_style and the lr_ settings", "请使用lr_decay_style及lr_各项"),
    )
    use_checkpoint_opt_param_scheduler: Bool = field(
        True,
        "When resuming, schedules come from the checkpoint.",
        "续训时调度器取检查点中的设置。",
        "lr",
        flag="--use-checkpoint-opt_param-scheduler",
        also=("--use-checkpoint-opt-param-scheduler",),
        megatron=False,
    )
    override_opt_param_scheduler: Bool = field(
        False,
        "When resuming, schedules come from this configuration.",
        "续训时调度器取本配置的设置。",
        "lr",
        flag="--override-opt_param-scheduler",
        also=("--override-opt-param-scheduler",),
    )

    weight_decay: NotNegative = field(0.0, "Weight decay.", "权重衰减。", "optimizer", megatron=0.01)
    start_weight_decay: NotNegative | None = field(
        None, "Weight decay at the start.", "起始权重衰减。", "optimizer", derived="weight_decay if constant, else 0.0"
    )
    end_weight_decay: NotNegative | None = field(
        None, "Weight decay at the end.", "结束权重衰减。", "optimizer", derived="weight_decay"
    )
    weight_decay_incr_style: one_of(*WEIGHT_DECAY_STYLES) = field(
        "constant", "How weight decay goes from start to end.", "权重衰减从起始到结束的变化方式。", "optimizer"
    )
    weight_decay_kwargs: dict | None = field(
        None,
        "Upstream's older form.",
        "上游的旧形式。",
        "error",
        name=YAML_ONLY,
        refused=(
            "use weight_decay, start_weight_decay, end_weight_decay",
            "请使用weight_decay、start_weight_decay、end_weight_decay",
        ),
    )
    no_weight_decay_params: StrList | None = field(
        None,
        "Parameters without weight decay; null: biases and one-dimensional ones.",
        "不做权重衰减的参数，空表示偏置和一维参数。",
        "optimizer",
        form=LIST,
    )
    clip_grad: NotNegative = field(
        0.0,
        "Gradients are clipped to this global norm; 0 for none.",
        "梯度裁剪的全局范数，0表示不裁剪。",
        "optimizer",
        megatron=1.0,
    )
    clip_grad_type: one_of(*CLIP_TYPES) = field(
        "ClipGlobalNorm",
        "What clip_grad limits: the global norm, or each element.",
        "clip_grad限制的对象：全局范数或每个元素。",
        "optimizer",
    )

    overlap_param_gather: Bool = field(
        False, "Gather parameters while the forward pass runs.", "前向计算的同时聚合参数。", "operators"
    )
    overlap_param_gather_with_optimizer_step: Bool = field(
        False,
        "Gather parameters while the optimizer steps.",
        "优化器更新的同时聚合参数。",
        "operators",
        later="gathering parameters during the update",
    )
    zero_config: ZeroConfig | None = field(None, "Details of ZeRO.", "ZeRO的细节设置。")
    optimizer_cpu_offload: Bool = field(
        False,
        "Keep optimizer state on the host.",
        "优化器状态放在主机内存。",
        "log",
        also=("--swap-optimizer",),
        ignored=_HOST_STATE,
    )
    use_precision_aware_optimizer: Bool = field(
        False,
        "Optimizer state in other data types.",
        "优化器状态使用其他数据类型。",
        "error",
        refused=("optimizer state is kept in fp32", "优化器状态以fp32保存"),
    )
    reuse_fp32_param: Bool = field(
        False,
        "bf16 weights and master weights share memory.",
        "bf16权重与fp32主权重共用内存。",
        "memory",
        later="shared storage of bf16 and fp32 parameters",
    )

    parallel_config: ModelParallelConfig = link(ModelParallelConfig)

    def __init__(self, parallel_config=None, **fields):
        links = {"parallel_config": parallel_config} if parallel_config is not None else {}
        super().__init__(**links, **fields)

    @classmethod
    def rewrite(cls, values, problems):
        """Read `clip_grad: {grad_clip_type, clip_value}` as the two fields."""
        clip = values.get("clip_grad")
        if not isinstance(clip, dict):
            return values
        values = dict(values)
        values.pop("clip_grad")
        try:
            clip = GradClipConfig(**{str(name): value for name, value in clip.items()})
        except ConfigError as error:
            problems += [problem.under("clip_grad") for problem in error.problems]
            return values
        values["clip_grad"] = clip.clip_value
        values.setdefault("clip_grad_type", clip.grad_clip_type)
        return values

    def derive(self):
        """Fill derived fields; see each field's `derived`."""
        constant = self.weight_decay_incr_style == "constant"
        if self.start_weight_decay is None:
            self.fill(start_weight_decay=self.weight_decay if constant else 0.0)
        if self.end_weight_decay is None:
            self.fill(end_weight_decay=self.weight_decay)
        if self.no_weight_decay_params == ["Default_Setup"]:  # upstream's word for the default
            self.fill(no_weight_decay_params=None)

    @property
    def is_adam(self):
        """Whether the optimizer is Megatron's AdamW, under any of its names."""
        return self.optimizer_type in OPTIMIZERS[ADAM]
