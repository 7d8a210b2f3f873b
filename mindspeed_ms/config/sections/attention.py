"""The part of `model_config` about attention, and its mapping `fa_config`."""

from functools import partial
from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, OFF, SWITCH, TAKEN, VALUE, Alias, field
from mindspeed_ms.config.values import Bool, Int, LayerPattern, PositiveInt, Probability, integer, one_of, registered
from mindspeed_ms.layout.describers import kinds


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
    window_attn_skip_freq: LayerPattern | None = field(
        None,
        "Which layers have the sliding window: 0/1 per layer, or n: every n-th layer attends to all; null: every layer.",
        "哪些层使用滑动窗口：逐层0/1列表，或n表示每第n层可见全部；空表示所有层。",
        "output",
        megatron=None,
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
