"""`training_config`: length, precision, loss scaling, gradient reduction, logging."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.checkpoint import CheckpointFields
from mindspeed_ms.config.sections.dataset import DatasetConfig
from mindspeed_ms.config.sections.field import OFF, ON, SWITCH, VALUE, Alias, field, link, option_of
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.config.sections.optimizer import GradClipConfig
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.sections.posttrain import PosttrainFields
from mindspeed_ms.config.sections.profile import ProfileFields
from mindspeed_ms.config.values import Bool, Count, PositiveFloat, PositiveInt, Str, integer, one_of

_NO_GRAPH = ("nothing is compiled to graphs here", "本框架不编译图")
_SCALING = ("fp16", "initial_loss_scale", "loss_scale_factor", "loss_scale_window")
_AS_MEGATRON = "Megatron's default, if all three are left out"
LOSS_SCALE = ("loss_scale_value", "loss_scale_factor", "loss_scale_window")  # all of them, or none
LOSS_FUNCTIONS = ("VocabParallelCrossEntropy",)


class LossFunctionConfig(Section):
    """`training_config.loss_func_kwargs`."""

    config_name: ClassVar[str] = "loss_func_kwargs"

    loss_func_type: one_of(*LOSS_FUNCTIONS) = field(LOSS_FUNCTIONS[0], "Loss function.", "损失函数。", "error")


class RunFields(Section):
    """Length of the run, precision, loss scaling, gradient reduction, logging."""

    seed: PositiveInt | None = field(None, "Random seed; null takes 1234.", "随机种子，空表示1234。", "output", megatron=1234)
    training_iters: Count = field(
        0,
        "Number of training steps.",
        "训练步数。",
        "log",
        name="train_iters",
        also=("--training-iters",),
        yaml_names=("train_iters",),
    )
    epochs: PositiveInt | None = field(
        None,
        "Passes over the data; with training_iters unset this ends the run.",
        "遍历数据的轮数；未设training_iters时由它决定训练长度。",
        "log",
    )
    log_interval: PositiveInt | None = field(
        None, "Steps between log lines; null logs every step.", "日志间隔步数，空表示每步。", "log", megatron=100
    )
    eval_interval: PositiveInt | None = field(
        None, "Steps between evaluations; null evaluates never.", "评估间隔步数，空表示不评估。", "log", megatron=1000
    )
    eval_iters: Count = field(100, "Batches per evaluation.", "每次评估的批次数。", "log")
    best_metric_comparison: one_of("less_equal", "greater_equal", "less", "greater") | None = field(
        None,
        "Keep the checkpoint of the best evaluation under this comparison.",
        "按此比较方式保留评估最好的检查点。",
        "file",
        later="keeping the best checkpoint",
        later_parts=("training_config.eval_metric",),
    )
    eval_metric: Str | None = field(None, "Metric that decides which evaluation is best.", "决定最好评估的指标。", "file")
    exit_interval: PositiveInt | None = field(
        None, "End the run at a multiple of so many steps.", "到达该步数的倍数时结束。", "log"
    )
    exit_duration_in_mins: PositiveInt | None = field(
        None, "Save and end after so many minutes.", "运行若干分钟后保存并结束。", "log"
    )
    exit_signal_handler: Bool = field(
        True,
        "SIGTERM saves and ends the run.",
        "收到SIGTERM时保存并结束。",
        "file",
        megatron=False,
        convert=conversions.exit_signal_handler,
    )
    skip_train: Bool = field(False, "Only evaluate.", "只做评估。", "log")

    fp16: Bool = field(False, "Train in fp16 with loss scaling.", "使用fp16及损失缩放训练。", "output")
    bf16: Bool = field(False, "Train in bf16.", "使用bf16训练。", "output", convert=conversions.bf16)
    loss_scale: PositiveFloat | None = field(
        None, "Constant loss scale; null scales dynamically in fp16.", "固定的损失缩放值；fp16下空表示动态缩放。", "log"
    )
    loss_scale_value: PositiveFloat | None = field(
        None,
        "Dynamic loss scale at the start.",
        "动态损失缩放的初始值。",
        "log",
        name="initial_loss_scale",
        also=("--loss-scale-value",),
        megatron=2.0**32,
        needs=_SCALING,
        derived=_AS_MEGATRON,
        yaml_names=("initial_loss_scale",),
    )
    loss_scale_factor: PositiveFloat | None = field(
        None,
        "The dynamic loss scale grows and shrinks by this factor.",
        "动态损失缩放增大和减小的倍数。",
        "log",
        megatron=2.0,
        needs=_SCALING,
        derived=_AS_MEGATRON,
    )
    loss_scale_window: PositiveInt | None = field(
        None,
        "Steps without overflow after which the loss scale grows.",
        "连续多少步无溢出后放大损失缩放。",
        "log",
        megatron=1000,
        needs=_SCALING,
        derived=_AS_MEGATRON,
    )
    min_loss_scale: PositiveFloat = field(1.0, "Smallest dynamic loss scale.", "动态损失缩放的下限。", "log")
    hysteresis: PositiveInt = field(
        2,
        "Overflows in a row that are borne before the loss scale shrinks.",
        "缩小损失缩放之前容忍的溢出次数。",
        "log",
        note=(
            "upstream maps it to the growth factor; here it is Megatron's hysteresis, loss_scale_factor is the factor",
            "上游误映射为缩放倍数；此处为Megatron的hysteresis，倍数为loss_scale_factor",
        ),
    )
    loss_reduction: one_of("mean", "sum") = field(
        "mean", "How token losses are combined.", "token损失的合并方式。", "optimizer", later="a loss that is summed"
    )
    calculate_per_token_loss: Bool = field(
        False,
        "Divide by all tokens of the step instead of those of each micro-batch.",
        "按整步的token数而不是每个微批的token数归一。",
        "optimizer",
    )
    loss_func_kwargs: LossFunctionConfig | None = field(LossFunctionConfig, "Loss function.", "损失函数。")
    grad_clip_kwargs: GradClipConfig | None = field(None, "Gradient clipping.", "梯度裁剪。")

    wrap_with_ddp: Bool = field(
        False,
        "Wrap the model so that gradients are reduced in buckets.",
        "用数据并行包装模型，按桶规约梯度。",
        "error",
        megatron=True,
        note=(
            "gradients are kept in buffers and reduced over data parallel ranks in any case; False refuses the settings "
            "that belong to the wrapper",
            "梯度总是存放在缓冲区并在数据并行rank间规约；False会拒绝属于该包装的设置",
        ),
    )
    use_distributed_optimizer: Bool = field(
        False, "Cut optimizer state over data parallel ranks.", "把优化器状态切到数据并行rank上。", "memory"
    )
    accumulate_allreduce_grads_in_fp32: Bool = field(
        False,
        "Accumulate and reduce gradients in fp32 instead of the parameter's type.",
        "以fp32而不是参数类型累加和规约梯度。",
        "memory",
    )
    grad_reduce_in_bf16: Bool = field(False, "Reduce gradients in bf16.", "以bf16规约梯度。", "log")
    overlap_grad_reduce: Bool = field(
        False, "Reduce each bucket as soon as it is full.", "桶就绪后立即规约，与计算重叠。", "operators"
    )
    delay_grad_reduce: Bool = field(
        False, "Later pipeline stages reduce their gradients together with the first.", "除第一级外推迟梯度规约。", "operators"
    )
    average_in_collective: Bool = field(
        False,
        "Divide by the group inside the collective.",
        "在集合通信内取平均。",
        "operators",
        also=("--ddp-average-in-collective",),
    )
    bucket_size: PositiveInt | None = field(
        None, "Elements per bucket.", "每个桶的元素数。", "operators", also=("--ddp-bucket-size",)
    )
    enable_mem_align: Bool = field(
        False,
        "Start each parameter in a buffer at a multiple of 512 bytes.",
        "缓冲区中各参数按512字节对齐。",
        "memory",
        off="--disable-mem-align",
    )
    check_for_nan_in_grad: Bool = field(
        False, "Stop if a gradient is not finite before it is reduced.", "规约前梯度非有限则停止。", "error", form=ON
    )
    check_for_nan_in_loss: Bool = field(
        True,
        "Stop with iteration and rank if the loss is not finite.",
        "损失非有限时报出步数和rank并停止。",
        "error",
        form=ON,
        aliases=(
            Alias(
                "check_for_nan_in_loss_and_grad",
                "Stop if loss or gradient is not finite.",
                "损失或梯度非有限时停止。",
                convert=conversions.check_for_nan,
                form=OFF,
                megatron=True,
            ),
        ),
    )
    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = field(
        None,
        "Steps between checks that data parallel ranks hold equal weights.",
        "检查各数据并行rank权重一致的间隔步数。",
        "error",
    )
    empty_unused_memory_level: integer(ge=0, le=2) = field(
        0,
        "Free cached memory: 0 never, 1 after a step, 2 also inside.",
        "释放缓存显存：0不释放，1每步后，2步内也释放。",
        "log",
        ignored=("MindSpore's memory pool reuses what is free by itself", "MindSpore内存池会自行复用空闲内存"),
    )
    manual_gc: Bool = field(False, "Collect garbage at fixed steps on all ranks.", "所有rank在固定步数做垃圾回收。", "memory")
    manual_gc_interval: Count = field(
        0, "Steps between the collections; 0 at evaluation only.", "垃圾回收的间隔步数，0表示仅评估时。", "memory"
    )
    enable_compile_cache: Bool = field(
        False,
        "Cache of compiled graphs; nothing is compiled here.",
        "编译缓存；本框架不编译图。",
        "log",
        form=SWITCH,
        ignored=_NO_GRAPH,
    )
    compile_cache_path: Str | None = field(None, "Folder of that cache.", "编译缓存目录。", "log", ignored=_NO_GRAPH)

    log_throughput: Bool = field(False, "Log model TFLOP/s.", "记录模型TFLOP/s。", "log")
    log_num_zeros_in_grad: Bool = field(False, "Log how many gradient elements are zero.", "记录梯度中零元素个数。", "log")
    log_params_norm: Bool = field(False, "Log the norm of the weights.", "记录权重范数。", "log")
    log_loss_scale_to_tensorboard: Bool = field(
        True, "Loss scale goes to TensorBoard too.", "损失缩放写入TensorBoard。", "file", form=OFF
    )
    log_learning_rate_to_tensorboard: Bool = field(
        True, "Learning rate goes to TensorBoard too.", "学习率写入TensorBoard。", "file", form=OFF
    )
    timing_log_level: integer(ge=0, le=2) = field(
        0,
        "Timers that run and are logged: 0 none, 1 parts of a step, 2 also parts of a micro-batch.",
        "运行并记录的计时器：0无，1为每步各部分，2还包括微批内各部分。",
        "log",
    )
    timing_log_option: one_of("max", "minmax", "all") = field(
        "minmax", "Ranks that the logged timers show.", "计时日志显示的rank范围。", "log"
    )
    log_timers_to_tensorboard: Bool = field(False, "Step times go to TensorBoard too.", "耗时写入TensorBoard。", "file")
    log_batch_size_to_tensorboard: Bool = field(
        False, "Batch size goes to TensorBoard too.", "批次大小写入TensorBoard。", "file"
    )
    log_memory_to_tensorboard: Bool = field(False, "Memory goes to TensorBoard too.", "内存写入TensorBoard。", "file")
    log_validation_ppl_to_tensorboard: Bool = field(
        False, "Perplexity goes to TensorBoard too.", "困惑度写入TensorBoard。", "file"
    )
    tensorboard_dir: Str | None = field(None, "Folder of TensorBoard files.", "TensorBoard文件目录。", "file")
    tensorboard_log_interval: PositiveInt = field(1, "Steps between TensorBoard entries.", "TensorBoard记录间隔。", "file")
    tensorboard_queue_size: PositiveInt = field(1000, "Entries that TensorBoard holds back.", "TensorBoard缓存条数。", "file")
    log_level: one_of("debug", "info", "warning", "error") = field(
        "info",
        "Least important messages shown.",
        "显示的最低日志级别。",
        "log",
        aliases=(
            Alias(
                "logging_level",
                "Python's number of the log level (20 is info).",
                "Python日志级别的数值（20为info）。",
                convert=conversions.logging_level,
                form=VALUE,
            ),
        ),
    )
    device_target: one_of("CPU", "Ascend") | None = field(
        None,
        "Device; null takes what is there.",
        "设备，空表示自动选择。",
        "operators",
        name="device",
        also=("--device-target",),
    )


class TrainingConfig(ProfileFields, CheckpointFields, RunFields, PosttrainFields):
    """`training_config`: the run. `TrainingConfig(parallel_config, dataset_config=..., lora_config=..., **fields)`."""

    config_name: ClassVar[str] = "training_config"

    parallel_config: ModelParallelConfig = link(ModelParallelConfig)
    dataset_config: DatasetConfig = link(DatasetConfig)
    lora_config: LoraConfig = link(LoraConfig)

    def __init__(self, parallel_config=None, dataset_config=None, lora_config=None, **fields):
        links = {"parallel_config": parallel_config, "dataset_config": dataset_config, "lora_config": lora_config}
        super().__init__(**{name: value for name, value in links.items() if value is not None}, **fields)

    def derive(self):
        """Fill the dynamic loss scale's settings, if none of them is given."""
        super().derive()
        if all(self[name] is None for name in LOSS_SCALE):
            self.fill(**{name: option_of(self.own_fields()[name]).megatron for name in LOSS_SCALE})

    @property
    def dynamic_loss_scale(self):
        """True if the loss scale adapts: fp16 without a constant `loss_scale`."""
        return self.fp16 and self.loss_scale is None

    @property
    def random_seed(self):
        """Seed of the run: `seed`, or 1234."""
        return self.seed if self.seed is not None else 1234
