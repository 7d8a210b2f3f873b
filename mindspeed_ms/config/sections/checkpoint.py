"""The part of `training_config` about checkpoints."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import SWITCH, VALUE, Alias, field
from mindspeed_ms.config.values import Bool, Count, PositiveInt, Str, one_of


class CheckpointFields(Section):
    """Saving and loading."""

    output_dir: Str = field(
        "./output",
        "Folder of checkpoints, logs and figures.",
        "检查点、日志和图表的输出目录。",
        "file",
        name="save",
        also=("--output-dir",),
        megatron=None,
        convert=conversions.save,
        note=("as in Megatron nothing is saved from arguments without --save", "与Megatron相同，参数方式下没有--save则不保存"),
        yaml_names=("save",),
    )
    save_enabled: Bool = field(True, "Write checkpoints at all.", "是否保存检查点。", "file", form=SWITCH, megatron=False)
    save_interval: PositiveInt | None = field(
        None,
        "Steps between checkpoints; null saves at the end only.",
        "保存间隔步数，空表示只在结束时保存。",
        "file",
        also=("--persistent-save-interval",),
    )
    non_persistent_save_interval: PositiveInt | None = field(
        None, "Steps between checkpoints that are replaced by the next.", "可被覆盖的临时检查点的间隔步数。", "file"
    )
    prefix: Str = field(
        "network",
        "Prefix of checkpoint files in upstream's formats.",
        "上游格式检查点文件的前缀。",
        "log",
        name="ckpt_prefix",
        also=("--prefix",),
        ignored=(
            "without ckpt_format, whose files begin with it: a checkpoint is a folder iter_N, as Megatron's",
            "未设置ckpt_format时忽略（设置后为其文件名前缀）：检查点是iter_N目录，与Megatron相同",
        ),
        yaml_names=("ckpt_prefix",),
    )
    ckpt_format: one_of("ckpt", "safetensors") | None = field(
        None,
        "Upstream's file formats; null takes our own.",
        "上游的文件格式，空表示本框架的格式。",
        "file",
        megatron=None,
        convert=conversions.ckpt_format,
        note=(
            "unset and Megatron's names (torch, torch_dist, ...) take our own format",
            "不设置或使用Megatron的名称（torch、torch_dist等）时为本框架的格式",
        ),
    )
    keep_checkpoint_max: PositiveInt | None = field(
        5,
        "Checkpoints that are kept; null keeps all.",
        "保留的检查点个数，空表示全部保留。",
        "file",
        also=("--max-keep-ckpts",),
    )
    crc_check: Bool = field(
        False,
        "Check sums are verified on save and load.",
        "保存和加载时校验。",
        "error",
        name="resume_crc_check",
        also=("--crc-check",),
        yaml_names=("resume_crc_check",),
    )
    async_save: Bool = field(False, "Write checkpoints beside the training.", "训练的同时写检查点。", "file")
    no_save_optim: Bool = field(False, "Leave optimizer state out of checkpoints.", "检查点不含优化器状态。", "file")
    no_save_rng: Bool = field(False, "Leave random states out of checkpoints.", "检查点不含随机数状态。", "file")

    resume_training: Bool = field(
        False,
        "Continue the run whose checkpoints lie in load_checkpoint or output_dir.",
        "从load_checkpoint或output_dir中的检查点继续训练。",
        "log",
    )
    load_checkpoint: Str | None = field(
        "",
        "Folder or file of weights to start from.",
        "要加载的权重目录或文件。",
        "output",
        name="load",
        also=("--load-checkpoint",),
        megatron=None,
        convert=conversions.load,
        note=(
            "from arguments it resumes, as in Megatron, unless --finetune",
            "参数方式下与Megatron相同，会续训，除非--finetune",
        ),
        yaml_names=("load",),
    )
    ckpt_step: Count | None = field(None, "Iteration to load; null takes the newest.", "要加载的步数，空表示最新。", "output")
    load_strict: Bool = field(
        True,
        "Every tensor must be found and used.",
        "要求张量全部匹配。",
        "error",
        form=SWITCH,
        aliases=(
            Alias("load_checkpoint_loosely", "The same as load_strict False.", "等同load_strict: False。", value=False),
            Alias(
                "dist_ckpt_strictness",
                "raise_all, raise_unexpected: load_strict True; log_*, ignore_all: False.",
                "raise_all、raise_unexpected等同load_strict: True；log_*、ignore_all等同False。",
                convert=conversions.strictness,
                form=VALUE,
            ),
        ),
    )
    pretrained_checkpoint: Str | None = field(None, "Weights for finetuning.", "用于微调的预训练权重。", "output")
    finetune: Bool = field(False, "Load weights only and start at iteration 0.", "只加载权重并从第0步开始。", "log")
    no_load_optim: Bool = field(False, "Do not load optimizer state.", "不加载优化器状态。", "optimizer")
    no_load_rng: Bool = field(False, "Do not load random states.", "不加载随机数状态。", "output")
    new_dataset: Bool = field(False, "Start the data from its beginning when resuming.", "续训时从头开始读数据。", "data")
    exit_on_missing_checkpoint: Bool = field(
        False, "Stop if the checkpoint to load is not there.", "要加载的检查点不存在时停止。", "error"
    )
    use_checkpoint_args: Bool = field(
        False, "Take the model's shape from the checkpoint.", "从检查点读取模型形状。", "parameters"
    )
