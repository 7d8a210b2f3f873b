"""The part of ``training_config`` about checkpoints."""

from mindspeed_ms.config.sections.base import Section, field
from mindspeed_ms.config.values import Bool, Count, PositiveInt, Str, one_of


class CheckpointFields(Section):
    """Saving and loading."""

    output_dir: Str = field("./output", "Folder of checkpoints, logs and figures.", "检查点、日志和图表的输出目录。")
    save_interval: PositiveInt | None = field(
        None, "Steps between checkpoints; null saves at the end only.", "保存间隔步数，空表示只在结束时保存。"
    )
    non_persistent_save_interval: PositiveInt | None = field(
        None, "Steps between checkpoints that are replaced by the next.", "可被覆盖的临时检查点的间隔步数。"
    )
    prefix: Str = field("network", "Prefix of checkpoint files in upstream's formats.", "上游格式检查点文件的前缀。")
    ckpt_format: one_of("ckpt", "safetensors") | None = field(
        None, "Upstream's file formats; null takes our own.", "上游的文件格式，空表示本框架的格式。"
    )
    keep_checkpoint_max: PositiveInt | None = field(
        5, "Checkpoints that are kept; null keeps all.", "保留的检查点个数，空表示全部保留。"
    )
    crc_check: Bool = field(False, "Check sums are verified on save and load.", "保存和加载时校验。")
    async_save: Bool = field(False, "Write checkpoints beside the training.", "训练的同时写检查点。")
    save_enabled: Bool = field(True, "Write checkpoints at all.", "是否保存检查点。")
    no_save_optim: Bool = field(False, "Leave optimizer state out of checkpoints.", "检查点不含优化器状态。")
    no_save_rng: Bool = field(False, "Leave random states out of checkpoints.", "检查点不含随机数状态。")

    resume_training: Bool = field(
        False,
        "Continue the run whose checkpoints lie in load_checkpoint or output_dir.",
        "从load_checkpoint或output_dir中的检查点继续训练。",
    )
    load_checkpoint: Str | None = field("", "Folder or file of weights to start from.", "要加载的权重目录或文件。")
    ckpt_step: Count | None = field(None, "Iteration to load; null takes the newest.", "要加载的步数，空表示最新。")
    load_strict: Bool = field(True, "Every tensor must be found and used.", "要求张量全部匹配。")
    pretrained_checkpoint: Str | None = field(None, "Weights for finetuning.", "用于微调的预训练权重。")
    finetune: Bool = field(False, "Load weights only and start at iteration 0.", "只加载权重并从第0步开始。")
    no_load_optim: Bool = field(False, "Do not load optimizer state.", "不加载优化器状态。")
    no_load_rng: Bool = field(False, "Do not load random states.", "不加载随机数状态。")
    new_dataset: Bool = field(False, "Start the data from its beginning when resuming.", "续训时从头开始读数据。")
    exit_on_missing_checkpoint: Bool = field(
        False, "Stop if the checkpoint to load is not there.", "要加载的检查点不存在时停止。"
    )
    use_checkpoint_args: Bool = field(False, "Take the model's shape from the checkpoint.", "从检查点读取模型形状。")
