"""``training_config``: length, precision, loss scaling, gradient reduction, logging."""

from typing import ClassVar

from mindspeed_ms.config.sections.base import Section, field, link
from mindspeed_ms.config.sections.checkpoint import CheckpointFields
from mindspeed_ms.config.sections.dataset import DatasetConfig
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.config.sections.optimizer import GradClipConfig
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.sections.profile import ProfileFields
from mindspeed_ms.config.values import Bool, Count, PositiveFloat, PositiveInt, Str, integer, one_of

LOSS_FUNCTIONS = ("VocabParallelCrossEntropy",)


class LossFunctionConfig(Section):
    """``training_config.loss_func_kwargs``."""

    config_name: ClassVar[str] = "loss_func_kwargs"

    loss_func_type: one_of(*LOSS_FUNCTIONS) = field(LOSS_FUNCTIONS[0], "Loss function.", "损失函数。")


class TrainingConfig(CheckpointFields, ProfileFields):
    """The run. ``TrainingConfig(parallel_config, dataset_config=..., lora_config=..., **fields)``."""

    config_name: ClassVar[str] = "training_config"
    spellings: ClassVar[dict[str, str]] = {
        "train_iters": "training_iters",
        "initial_loss_scale": "loss_scale_value",
        "load": "load_checkpoint",
        "save": "output_dir",
        "ckpt_prefix": "prefix",
        "resume_crc_check": "crc_check",
        "profile_with_memory": "profile_memory",
    }

    seed: PositiveInt | None = field(None, "Random seed; null takes 1234.", "随机种子，空表示1234。")
    training_iters: Count = field(0, "Number of training steps.", "训练步数。")
    epochs: PositiveInt | None = field(
        None,
        "Passes over the data; with training_iters unset this ends the run.",
        "遍历数据的轮数；未设training_iters时由它决定训练长度。",
    )
    log_interval: PositiveInt | None = field(
        None, "Steps between log lines; null logs every step.", "日志间隔步数，空表示每步。"
    )
    eval_interval: PositiveInt | None = field(
        None, "Steps between evaluations; null evaluates never.", "评估间隔步数，空表示不评估。"
    )
    eval_iters: Count = field(100, "Batches per evaluation.", "每次评估的批次数。")
    best_metric_comparison: one_of("less_equal", "greater_equal", "less", "greater") | None = field(
        None, "Keep the checkpoint of the best evaluation under this comparison.", "按此比较方式保留评估最好的检查点。"
    )
    eval_metric: Str | None = field(None, "Metric that decides which evaluation is best.", "决定最好评估的指标。")
    exit_interval: PositiveInt | None = field(None, "End the run at a multiple of so many steps.", "到达该步数的倍数时结束。")
    exit_duration_in_mins: PositiveInt | None = field(None, "Save and end after so many minutes.", "运行若干分钟后保存并结束。")
    exit_signal_handler: Bool = field(True, "SIGTERM saves and ends the run.", "收到SIGTERM时保存并结束。")
    skip_train: Bool = field(False, "Only evaluate.", "只做评估。")

    fp16: Bool = field(False, "Train in fp16 with loss scaling.", "使用fp16及损失缩放训练。")
    bf16: Bool = field(False, "Train in bf16.", "使用bf16训练。")
    loss_scale: PositiveFloat | None = field(
        None, "Constant loss scale; null scales dynamically in fp16.", "固定的损失缩放值；fp16下空表示动态缩放。"
    )
    loss_scale_value: PositiveFloat | None = field(None, "Dynamic loss scale at the start.", "动态损失缩放的初始值。")
    loss_scale_factor: PositiveFloat | None = field(
        None, "The dynamic loss scale grows and shrinks by this factor.", "动态损失缩放增大和减小的倍数。"
    )
    loss_scale_window: PositiveInt | None = field(
        None, "Steps without overflow after which the loss scale grows.", "连续多少步无溢出后放大损失缩放。"
    )
    min_loss_scale: PositiveFloat = field(1.0, "Smallest dynamic loss scale.", "动态损失缩放的下限。")
    hysteresis: PositiveInt = field(
        2, "Overflows in a row that are borne before the loss scale shrinks.", "缩小损失缩放之前容忍的溢出次数。"
    )
    loss_reduction: one_of("mean", "sum") = field("mean", "How token losses are combined.", "token损失的合并方式。")
    calculate_per_token_loss: Bool = field(
        False,
        "Divide by all tokens of the step instead of those of each micro-batch.",
        "按整步的token数而不是每个微批的token数归一。",
    )
    loss_func_kwargs: LossFunctionConfig | None = field(LossFunctionConfig, "Loss function.", "损失函数。")
    grad_clip_kwargs: GradClipConfig | None = field(None, "Gradient clipping.", "梯度裁剪。")

    wrap_with_ddp: Bool = field(
        False, "Wrap the model so that gradients are reduced in buckets.", "用数据并行包装模型，按桶规约梯度。"
    )
    use_distributed_optimizer: Bool = field(
        False, "Cut optimizer state over data parallel ranks.", "把优化器状态切到数据并行rank上。"
    )
    accumulate_allreduce_grads_in_fp32: Bool = field(
        False,
        "Accumulate and reduce gradients in fp32 instead of the parameter's type.",
        "以fp32而不是参数类型累加和规约梯度。",
    )
    grad_reduce_in_bf16: Bool = field(False, "Reduce gradients in bf16.", "以bf16规约梯度。")
    overlap_grad_reduce: Bool = field(False, "Reduce each bucket as soon as it is full.", "桶就绪后立即规约，与计算重叠。")
    delay_grad_reduce: Bool = field(
        False, "Later pipeline stages reduce their gradients together with the first.", "除第一级外推迟梯度规约。"
    )
    average_in_collective: Bool = field(False, "Divide by the group inside the collective.", "在集合通信内取平均。")
    bucket_size: PositiveInt | None = field(None, "Elements per bucket.", "每个桶的元素数。")
    enable_mem_align: Bool = field(
        False, "Start each parameter in a buffer at a multiple of 512 bytes.", "缓冲区中各参数按512字节对齐。"
    )
    check_for_nan_in_grad: Bool = field(
        False, "Stop if a gradient is not finite before it is reduced.", "规约前梯度非有限则停止。"
    )
    check_for_nan_in_loss: Bool = field(
        True, "Stop with iteration and rank if the loss is not finite.", "损失非有限时报出步数和rank并停止。"
    )
    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = field(
        None, "Steps between checks that data parallel ranks hold equal weights.", "检查各数据并行rank权重一致的间隔步数。"
    )
    empty_unused_memory_level: integer(ge=0, le=2) = field(
        0, "Free cached memory: 0 never, 1 after a step, 2 also inside.", "释放缓存显存：0不释放，1每步后，2步内也释放。"
    )
    manual_gc: Bool = field(False, "Collect garbage at fixed steps on all ranks.", "所有rank在固定步数做垃圾回收。")
    manual_gc_interval: Count = field(
        0, "Steps between the collections; 0 at evaluation only.", "垃圾回收的间隔步数，0表示仅评估时。"
    )
    enable_compile_cache: Bool = field(
        False, "Cache of compiled graphs; nothing is compiled here.", "编译缓存；本框架不编译图。"
    )
    compile_cache_path: Str | None = field(None, "Folder of that cache.", "编译缓存目录。")

    log_throughput: Bool = field(False, "Log model TFLOP/s.", "记录模型TFLOP/s。")
    log_num_zeros_in_grad: Bool = field(False, "Log how many gradient elements are zero.", "记录梯度中零元素个数。")
    log_params_norm: Bool = field(False, "Log the norm of the weights.", "记录权重范数。")
    log_loss_scale_to_tensorboard: Bool = field(True, "Loss scale goes to TensorBoard too.", "损失缩放写入TensorBoard。")
    log_learning_rate_to_tensorboard: Bool = field(True, "Learning rate goes to TensorBoard too.", "学习率写入TensorBoard。")
    log_timers_to_tensorboard: Bool = field(False, "Step times go to TensorBoard too.", "耗时写入TensorBoard。")
    log_batch_size_to_tensorboard: Bool = field(False, "Batch size goes to TensorBoard too.", "批次大小写入TensorBoard。")
    log_memory_to_tensorboard: Bool = field(False, "Memory goes to TensorBoard too.", "内存写入TensorBoard。")
    log_validation_ppl_to_tensorboard: Bool = field(False, "Perplexity goes to TensorBoard too.", "困惑度写入TensorBoard。")
    tensorboard_dir: Str | None = field(None, "Folder of TensorBoard files.", "TensorBoard文件目录。")
    tensorboard_log_interval: PositiveInt = field(1, "Steps between TensorBoard entries.", "TensorBoard记录间隔。")
    tensorboard_queue_size: PositiveInt = field(1000, "Entries that TensorBoard holds back.", "TensorBoard缓存条数。")
    log_level: one_of("debug", "info", "warning", "error") = field(
        "info", "Least important messages shown.", "显示的最低日志级别。"
    )
    device_target: one_of("CPU", "Ascend") | None = field(None, "Device; null takes what is there.", "设备，空表示自动选择。")

    parallel_config: ModelParallelConfig = link(ModelParallelConfig)
    dataset_config: DatasetConfig = link(DatasetConfig)
    lora_config: LoraConfig = link(LoraConfig)

    def __init__(self, parallel_config=None, dataset_config=None, lora_config=None, **fields):
        links = {"parallel_config": parallel_config, "dataset_config": dataset_config, "lora_config": lora_config}
        super().__init__(**{name: value for name, value in links.items() if value is not None}, **fields)

    @property
    def dynamic_loss_scale(self):
        """True if the loss scale adapts: fp16 without a constant ``loss_scale``."""
        return self.fp16 and self.loss_scale is None

    @property
    def random_seed(self):
        """The seed that is used: ``seed``, or 1234."""
        return self.seed if self.seed is not None else 1234
