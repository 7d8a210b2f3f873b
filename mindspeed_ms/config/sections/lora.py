"""`lora_config`: low-rank adapters."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, SWITCH, YAML_ONLY, field
from mindspeed_ms.config.values import Bool, Free, PositiveInt, Str, number


class LoraConfig(Section):
    """`lora_config`: low-rank adapters."""

    config_name: ClassVar[str] = "lora_config"

    use_lora: Bool = field(False, "Train low-rank adapters only.", "只训练低秩适配器。", "parameters", form=SWITCH)
    lora_rank: PositiveInt = field(
        8,
        "Rank of the adapters.",
        "适配器的秩。",
        "parameters",
        also=("--lora-r",),
        megatron=16,
        needs=("lora_target_modules", "use_lora"),
    )
    lora_alpha: PositiveInt = field(32, "Adapters are scaled by alpha / rank.", "适配器按alpha/rank缩放。", "output")
    lora_dropout: number(ge=0, lt=1) = field(0.0, "Dropout before the adapters.", "适配器之前的dropout。", "output")
    target_cells: list[Free] | None = field(
        None,
        "Which layers get adapters: [{'target_cells': [pattern, ...]}, {'cell': name, 'rank': .., 'alpha': ..}, ...].",
        "哪些层加适配器：[{'target_cells': [模式, ...]}, {'cell': 名称, 'rank': .., 'alpha': ..}, ...]。",
        "parameters",
        name="lora_target_modules",
        form=LIST,
        megatron=None,
        convert=conversions.lora_targets,
    )
    use_rslora: Bool = field(
        False, "Scale adapters by alpha / sqrt(rank) (rsLoRA).", "适配器按alpha/sqrt(rank)缩放（rsLoRA）。", "output"
    )
    lora_plus_ratio: number(gt=0) = field(
        1.0,
        "Learning rate of the B matrices over that of the A matrices (LoRA+).",
        "B矩阵与A矩阵学习率之比（LoRA+）。",
        "optimizer",
    )
    lora_load: Str | None = field(
        None,
        "Adapters to start from: a checkpoint with adapters, or a PEFT folder; load_checkpoint is the base.",
        "训练开始时加载的适配器：含适配器的权重，或PEFT目录；基座由load_checkpoint给出。",
        "output",
    )
    lora_ckpt_filter: Bool = field(
        False,
        "Save adapters alone; the base is needed to go on from such a checkpoint.",
        "只保存适配器；续训时需要基座权重。",
        "file",
    )
    lora_module: dict | None = field(
        None,
        "Found adapters per layer; filled when the model is built.",
        "各层的适配器，建模时填入。",
        "log",
        name=YAML_ONLY,
        ignored=("it is filled when the model is built; target_cells names the layers", "建模时填入；请用target_cells指定层"),
    )
