"""`lora_config`: low-rank adapters."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, SWITCH, YAML_ONLY, field
from mindspeed_ms.config.values import Bool, Free, PositiveInt, number


class LoraConfig(Section):
    """`lora_config`: low-rank adapters."""

    config_name: ClassVar[str] = "lora_config"

    use_lora: Bool = field(
        False,
        "Train low-rank adapters only.",
        "只训练低秩适配器。",
        "parameters",
        form=SWITCH,
        later="low-rank adapters",
        later_parts=("lora_config.",),
    )
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
    lora_module: dict | None = field(
        None,
        "Found adapters per layer; filled when the model is built.",
        "各层的适配器，建模时填入。",
        "log",
        name=YAML_ONLY,
        ignored=("it is filled when the model is built; target_cells names the layers", "建模时填入；请用target_cells指定层"),
    )
