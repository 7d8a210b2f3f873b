"""The part of `model_config` about attention and positions (RoPE), and its mappings `fa_config` and `rope_scaling`."""

from functools import partial
from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, OFF, SWITCH, TAKEN, VALUE, Alias, field
from mindspeed_ms.config.sections.layers import ONE_KERNEL
from mindspeed_ms.config.values import (
    Bool,
    Int,
    IntList,
    PositiveFloat,
    PositiveInt,
    Probability,
    integer,
    number,
    one_of,
    registered,
)
from mindspeed_ms.layout.describers import kinds

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


class FlashAttentionConfig(Section):
    """`model_config.fa_config`: settings of the fused attention operator."""

    config_name: ClassVar[str] = "fa_config"

    keep_prob: Probability | None = field(
        None,
        "1 - dropout inside the operator; null follows attention_dropout.",
        "算子内的保留概率，空表示1-attention_dropout。",
        "error",
        name="fa_keep_prob",
    )
    pre_tokens: Int = field(
        65536,
        "How many earlier tokens a token attends to (sparse_mode 4 and 0).",
        "每个token可见的之前token数。",
        "output",
        name="pre_tockens",
        names=("pre_tocken",),
        also=("--pre-tokens",),
        yaml_names=("pre_tockens",),
    )
    next_tokens: Int = field(
        0,
        "How many later tokens a token attends to.",
        "每个token可见的之后token数。",
        "output",
        name="next_tockens",
        names=("next_tocken",),
        also=("--next-tokens",),
        yaml_names=("next_tockens",),
    )
    input_layout: one_of("SBH", "BNSD", "BSH", "BSND") = field(
        "SBH",
        "Layout of the operator's inputs.",
        "算子输入的排布。",
        "operators",
        name="shape_order",
        also=("--fa-input-layout",),
        yaml_names=("shape_order",),
    )
    sparse_mode: integer(ge=0, le=4) = field(
        0, "Mask form of the fused attention operator.", "融合注意力算子的掩码模式。", "output", name="sparse_mode"
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


class AttentionFields(Section):
    """Attention: heads, groups, biases, the fused operator."""

    attention_type: registered(partial(kinds, "attention")) = field(
        "self_attn", "Kind of attention.", "注意力的种类。", "error"
    )
    group_query_attention: Bool = field(
        False, "Several query heads share one key/value head.", "多个查询头共用一组键值头。", "parameters", checkpoint=COMPARED
    )
    num_query_groups: PositiveInt | None = field(
        32,
        "Number of key/value groups under group_query_attention.",
        "分组查询注意力的键值组数。",
        "parameters",
        derived="num_attention_heads without group_query_attention or for null",
        megatron=1,
        convert=conversions.num_query_groups,
        checkpoint=COMPARED,
    )
    kv_channels: PositiveInt | None = field(
        None,
        "Width of one attention head.",
        "单个注意力头的宽度。",
        "parameters",
        derived="hidden_size / num_attention_heads",
        checkpoint=COMPARED,
    )
    qkv_has_bias: Bool = field(
        True,
        "Query, key and value projections have a bias.",
        "QKV投影带偏置。",
        "parameters",
        name="add_qkv_bias",
        megatron=False,
        yaml_names=("add_qkv_bias",),
        checkpoint=TAKEN,
    )
    out_proj_has_bias: Bool = field(
        True,
        "The attention output projection has a bias.",
        "注意力输出投影带偏置。",
        "parameters",
        name="add_dense_bias",
        megatron=False,
        yaml_names=("add_dense_bias",),
        checkpoint=TAKEN,
    )
    mlp_has_bias: Bool = field(
        False, "The feed-forward projections have a bias.", "前馈投影带偏置。", "parameters", form=SWITCH, checkpoint=TAKEN
    )
    add_bias_linear: Bool = field(
        False,
        "All linear layers have a bias.",
        "所有线性层带偏置。",
        "parameters",
        form=OFF,
        flag="--disable-bias-linear",
        also=("--no-add-bias-linear",),
        megatron=True,
        checkpoint=TAKEN,
    )
    apply_query_key_layer_scaling: Bool = field(
        False,
        "Divide attention scores by the layer number before, and multiply inside, the fp32 softmax.",
        "按层号缩放注意力分数，并在fp32 softmax内还原。",
        "operators",
        convert=conversions.query_key_layer_scaling,
        checkpoint=TAKEN,
    )
    qk_layernorm: Bool = field(
        False, "Normalise queries and keys of each head.", "对每个头的Q、K做归一化。", "parameters", checkpoint=COMPARED
    )
    sliding_window: PositiveInt | None = field(
        None,
        "How many tokens a token attends to, itself included; null: all earlier ones.",
        "每个token可见的token数（含自身）；空表示之前的全部。",
        "output",
        aliases=(
            Alias(
                "window_size",
                "Megatron's form, LEFT,RIGHT: how many earlier and later tokens; sets sliding_window to LEFT + 1.",
                "Megatron的写法LEFT,RIGHT：之前与之后可见的token数；即sliding_window为LEFT+1。",
                convert=conversions.window_size,
                form=VALUE,
            ),
        ),
        checkpoint=COMPARED,
    )
    window_attn_skip_freq: IntList | None = field(
        None,
        "Which layers have the sliding window: 0/1 per layer, or n: every n-th layer attends to all; null: every layer.",
        "哪些层使用滑动窗口：逐层0/1列表，或n表示每第n层可见全部；空表示所有层。",
        "output",
        megatron=None,
        convert=conversions.pattern("model_config.window_attn_skip_freq"),
        checkpoint=COMPARED,
    )
    attention_softmax_in_fp32: Bool = field(
        True,
        "Attention softmax in fp32.",
        "注意力softmax使用fp32。",
        "operators",
        derived="softmax_compute_dtype, if that is given",
        megatron=False,
    )
    mask_func_type: one_of("attn_mask_add", "attn_mask_fill") = field(
        "attn_mask_add",
        "How a mask enters the scores: added, or filled in.",
        "掩码作用于分数的方式：相加或填充。",
        "log",
        ignored=("a masked score leaves the softmax either way", "两种方式下被掩码的分数都不进入softmax"),
    )
    use_flash_attention: Bool = field(
        False,
        "Fused attention that holds no [s, s] matrix.",
        "使用不存放[s, s]矩阵的融合注意力。",
        "operators",
        name="use_flash_attn",
        also=("--use-flash-attention",),
        yaml_names=("use_flash_attn",),
    )
    fa_config: FlashAttentionConfig = field(
        FlashAttentionConfig, "Settings of the fused attention operator.", "融合注意力算子的设置。"
    )
    enable_flash_sp: Bool = field(
        False,
        "Upstream's joint operator of attention and sequence parallelism.",
        "上游的注意力与序列并行合并算子。",
        "error",
        form=SWITCH,
        also=("--use-flash-sp",),
        refused=(
            "the joint operator exists in no released MindSpore; sequence parallelism and flash attention work together "
            "as they are",
            "该合并算子不在已发布的MindSpore中；序列并行与FlashAttention可同时使用",
        ),
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
