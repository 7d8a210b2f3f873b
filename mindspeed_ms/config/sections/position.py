"""The part of `model_config` about positions: learned, rotary (RoPE), and its mapping `rope_scaling`."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, OFF, SWITCH, TAKEN, VALUE, Alias, field
from mindspeed_ms.config.sections.layers import ONE_KERNEL
from mindspeed_ms.config.values import Bool, PositiveFloat, PositiveInt, number, one_of

POSITION_TYPES = ("absolute", "learned_absolute", "rope", "none")


def mscale_of_megatron(name):
    """Megatron's option `--mscale` or `--mscale-all-dim`, which counts beside --rotary-scaling-factor."""
    return Alias(
        name,
        "The same, beside --rotary-scaling-factor.",
        "同上，与--rotary-scaling-factor同用。",
        convert=conversions.latent_mscale(name),
        form=VALUE,
        megatron=1.0,
    )


class RopeScalingConfig(Section):
    """`model_config.rope_scaling`: how rotary frequencies are changed for sequences longer than in training."""

    config_name: ClassVar[str] = "rope_scaling"

    type: one_of("linear", "llama3", "yarn") = field(
        "llama3",
        "Rule of the scaling: all frequencies alike (linear), or low ones only (llama3, yarn).",
        "缩放规则：所有频率同样缩放（linear），或只缩放低频（llama3、yarn）。",
        "output",
        name="rope_scaling_type",
        megatron=None,
        yaml_names=("rope_type",),
        aliases=(
            Alias(
                "use_rope_scaling",
                "Scale rotary frequencies as Llama 3 does.",
                "按Llama 3的方式缩放旋转频率。",
                convert=conversions.rope_scaling,
            ),
        ),
    )
    factor: PositiveFloat = field(
        8.0,
        "How many times longer the sequence gets.",
        "序列变长的倍数。",
        "output",
        name="rope_scaling_factor",
        convert=conversions.rope_scaling_value("factor"),
        aliases=(
            Alias(
                "rotary_scaling_factor",
                "Megatron's factor of yarn under multi_latent_attention; 1 is none.",
                "Megatron在multi_latent_attention下的yarn系数；1表示不缩放。",
                convert=conversions.rotary_scaling_factor,
                form=VALUE,
                megatron=1.0,
            ),
        ),
    )
    low_freq_factor: PositiveFloat = field(
        1.0,
        "llama3: below this frequency factor all is scaled.",
        "llama3：低于该频率系数的全部缩放。",
        "output",
        name="rope_scaling_low_freq_factor",
        also=("--low-freq-factor",),
        convert=conversions.rope_scaling_value("low_freq_factor"),
    )
    high_freq_factor: PositiveFloat = field(
        4.0,
        "llama3: above this frequency factor nothing is scaled.",
        "llama3：高于该频率系数的不缩放。",
        "output",
        name="rope_scaling_high_freq_factor",
        also=("--high-freq-factor",),
        convert=conversions.rope_scaling_value("high_freq_factor"),
    )
    original_max_position_embeddings: PositiveInt = field(
        8192,
        "Sequence length of the first training.",
        "最初训练的序列长度。",
        "output",
        name="rope_scaling_original_max_position_embeddings",
        also=("--original-max-position-embeddings",),
        convert=conversions.rope_scaling_value("original_max_position_embeddings"),
    )
    beta_fast: PositiveFloat = field(
        32.0,
        "yarn: rotations above which nothing is scaled.",
        "yarn：旋转次数高于此值不缩放。",
        "output",
        name="rope_scaling_beta_fast",
        convert=conversions.rope_scaling_value("beta_fast"),
    )
    beta_slow: PositiveFloat = field(
        1.0,
        "yarn: rotations below which all is scaled.",
        "yarn：旋转次数低于此值全部缩放。",
        "output",
        name="rope_scaling_beta_slow",
        convert=conversions.rope_scaling_value("beta_slow"),
    )
    attention_factor: PositiveFloat | None = field(
        None,
        "yarn: factor of the rotated queries and keys.",
        "yarn：旋转后Q、K的系数。",
        "output",
        name="rope_scaling_attention_factor",
        derived="(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1); no division without mscale_all_dim",
        convert=conversions.rope_scaling_value("attention_factor"),
    )
    mscale: PositiveFloat = field(
        1.0,
        "yarn: attention temperature.",
        "yarn：注意力温度系数。",
        "output",
        name="rope_scaling_mscale",
        convert=conversions.rope_scaling_value("mscale"),
        aliases=(mscale_of_megatron("mscale"),),
    )
    mscale_all_dim: PositiveFloat | None = field(
        None,
        "yarn: attention temperature over all dimensions.",
        "yarn：全维度的注意力温度系数。",
        "output",
        name="rope_scaling_mscale_all_dim",
        convert=conversions.rope_scaling_value("mscale_all_dim"),
        aliases=(mscale_of_megatron("mscale_all_dim"),),
    )
    truncate: Bool = field(
        True,
        "yarn: round the correction range.",
        "yarn：修正范围取整。",
        "output",
        name="rope_scaling_truncate",
        form=SWITCH,
        convert=conversions.rope_scaling_value("truncate"),
    )


class PositionFields(Section):
    """Position embeddings: learned, rotary (RoPE)."""

    position_embedding_type: one_of(*POSITION_TYPES) = field(
        "absolute",
        "Positions: absolute (= learned_absolute), rope, or none.",
        "位置编码：absolute（即可学习绝对位置）、rope或none。",
        "parameters",
        megatron="learned_absolute",
        checkpoint=COMPARED,
    )
    add_position_embedding: Bool = field(
        True,
        "Add the learned positions to the embedding.",
        "在词嵌入上加可学习位置。",
        "error",
        form=OFF,
        flag="--no-position-embedding",
        note=(
            "as in Megatron it needs rope; use --position-embedding-type none",
            "与Megatron相同，需使用rope；请用--position-embedding-type none",
        ),
        checkpoint=TAKEN,
    )
    parallel_position_embedding: Bool = field(
        False,
        "Cut the learned position table over tensor parallel ranks.",
        "将可学习位置表切到张量并行rank上。",
        "parameters",
        form=SWITCH,
    )
    use_rotary_position_embeddings: Bool = field(
        False,
        "Older flag for position_embedding_type rope.",
        "position_embedding_type为rope的旧写法。",
        "parameters",
        convert=conversions.rotary_positions,
        yaml_names=("use_rotary_embedding",),
        checkpoint=TAKEN,
    )
    rotary_base: PositiveFloat = field(
        10000.0, "Base period of rotary positions.", "旋转位置编码的基本周期。", "output", checkpoint=COMPARED
    )
    rotary_percent: number(gt=0, le=1) = field(
        1.0, "Share of a head's width that is rotated.", "头宽度中参与旋转的比例。", "output", checkpoint=COMPARED
    )
    rotary_interleaved: Bool = field(
        False,
        "Rotate neighbouring pairs instead of halves.",
        "旋转相邻元素对而不是前后两半。",
        "output",
        derived="True with multi_latent_attention",
        convert=conversions.rotary_interleaved,
        checkpoint=COMPARED,
    )
    rotary_seq_len_interpolation_factor: PositiveFloat | None = field(
        None, "Positions are divided by this factor.", "位置除以该系数（线性插值）。", "output", checkpoint=COMPARED
    )
    rope_scaling: RopeScalingConfig | None = field(
        None, "Scaling of rotary frequencies for long sequences.", "长序列的旋转频率缩放。", checkpoint=COMPARED
    )
    apply_rope_fusion: Bool = field(
        False,
        "Use the fused rotary operator.",
        "使用融合的旋转位置算子。",
        "operators",
        also=("--use-fused-rotary-pos-emb",),
        off="--no-rope-fusion",
        megatron=True,
        convert=conversions.rope_fusion,
        note=ONE_KERNEL,
    )
