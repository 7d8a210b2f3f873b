"""Parts of ``model_config`` that are mappings of their own: fused attention, scaling of rotary positions."""

from typing import ClassVar

from mindspeed_ms.config.sections.base import Section, field
from mindspeed_ms.config.values import Bool, Int, PositiveFloat, PositiveInt, Probability, integer, one_of


class FlashAttentionConfig(Section):
    """``model_config.fa_config``: settings of the fused attention operator."""

    config_name: ClassVar[str] = "fa_config"
    spellings: ClassVar[dict[str, str]] = {
        "pre_tockens": "pre_tokens",
        "next_tockens": "next_tokens",
        "shape_order": "input_layout",
    }

    keep_prob: Probability | None = field(
        None,
        "1 - dropout inside the operator; null follows attention_dropout.",
        "算子内的保留概率，空表示1-attention_dropout。",
    )
    pre_tokens: Int = field(
        65536, "How many earlier tokens a token attends to (sparse_mode 4 and 0).", "每个token可见的之前token数。"
    )
    next_tokens: Int = field(0, "How many later tokens a token attends to.", "每个token可见的之后token数。")
    input_layout: one_of("SBH", "BNSD", "BSH", "BSND") = field("SBH", "Layout of the operator's inputs.", "算子输入的排布。")
    sparse_mode: integer(ge=0, le=4) = field(0, "Mask form of the fused attention operator.", "融合注意力算子的掩码模式。")


class RopeScalingConfig(Section):
    """``model_config.rope_scaling``: how rotary frequencies are changed for sequences longer than in training."""

    config_name: ClassVar[str] = "rope_scaling"
    spellings: ClassVar[dict[str, str]] = {"rope_type": "type"}

    type: one_of("linear", "llama3", "yarn", "longrope", "dynamic") = field("llama3", "Rule of the scaling.", "缩放规则。")
    factor: PositiveFloat = field(8.0, "How many times longer the sequence gets.", "序列变长的倍数。")
    low_freq_factor: PositiveFloat = field(
        1.0, "llama3: below this frequency factor all is scaled.", "llama3：低于该频率系数的全部缩放。"
    )
    high_freq_factor: PositiveFloat = field(
        4.0, "llama3: above this frequency factor nothing is scaled.", "llama3：高于该频率系数的不缩放。"
    )
    original_max_position_embeddings: PositiveInt = field(
        8192, "Sequence length of the first training.", "最初训练的序列长度。"
    )
    beta_fast: PositiveFloat = field(32.0, "yarn: rotations above which nothing is scaled.", "yarn：旋转次数高于此值不缩放。")
    beta_slow: PositiveFloat = field(1.0, "yarn: rotations below which all is scaled.", "yarn：旋转次数低于此值全部缩放。")
    mscale: PositiveFloat = field(1.0, "yarn: attention temperature.", "yarn：注意力温度系数。")
    mscale_all_dim: PositiveFloat | None = field(
        None, "yarn: attention temperature over all dimensions.", "yarn：全维度的注意力温度系数。"
    )
    truncate: Bool = field(True, "yarn: round the correction range.", "yarn：修正范围取整。")
