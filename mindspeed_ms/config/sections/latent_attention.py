"""The part of `model_config` about multi-latent attention (MLA) and attention sinks."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, field
from mindspeed_ms.config.values import Bool, PositiveFloat, PositiveInt, one_of

MULTI_LATENT = "multi_latent"
"""`attention_type` of multi-latent attention."""


class LatentAttentionFields(Section):
    """Multi-latent attention: ranks and widths; the epsilon of its norms; attention sinks."""

    multi_latent_attention: Bool = field(
        False,
        "DeepSeek's attention with compressed keys and values (MLA): attention_type multi_latent.",
        "DeepSeek的压缩KV注意力（MLA），即attention_type: multi_latent。",
        "parameters",
        also=("--multi-head-latent-attention",),
        checkpoint=COMPARED,
    )
    q_lora_rank: PositiveInt | None = field(
        None,
        "MLA: width of compressed queries; null: they are not compressed.",
        "MLA：压缩后Q的宽度；空表示不压缩。",
        "parameters",
        megatron=None,
        convert=conversions.latent_width("q_lora_rank"),
        checkpoint=COMPARED,
    )
    kv_lora_rank: PositiveInt = field(
        512,
        "MLA: width of compressed keys and values.",
        "MLA：压缩后KV的宽度。",
        "parameters",
        megatron=32,
        convert=conversions.latent_width("kv_lora_rank"),
        checkpoint=COMPARED,
    )
    qk_head_dim: PositiveInt = field(
        128,
        "MLA: width of a query's and key's head without positions.",
        "MLA：每头Q、K不含位置的宽度。",
        "parameters",
        also=("--qk-nope-head-dim",),
        yaml_names=("qk_nope_head_dim",),
        convert=conversions.latent_width("qk_head_dim"),
        checkpoint=COMPARED,
    )
    qk_pos_emb_head_dim: PositiveInt = field(
        64,
        "MLA: width of a query's and key's head with rotary positions.",
        "MLA：每头Q、K带旋转位置的宽度。",
        "parameters",
        also=("--qk-rope-head-dim",),
        yaml_names=("qk_rope_head_dim",),
        convert=conversions.latent_width("qk_pos_emb_head_dim"),
        checkpoint=COMPARED,
    )
    v_head_dim: PositiveInt = field(
        128,
        "MLA: width of a value's head.",
        "MLA：每头V的宽度。",
        "parameters",
        convert=conversions.latent_width("v_head_dim"),
        checkpoint=COMPARED,
    )
    qk_layernorm_epsilon: PositiveFloat | None = field(
        None,
        "Added to the variance in the norms of queries and keys (of compressed ones under MLA); null takes norm_epsilon.",
        "Q、K归一化（MLA下为压缩后的Q、KV）中加到方差上的小量；空表示norm_epsilon。",
        "output",
        checkpoint=COMPARED,
    )
    softmax_type: one_of("vanilla", "off-by-one", "learnable") = field(
        "vanilla",
        "Attention softmax: vanilla, or with one more score per head that has no value (attention sink): 0, or learned.",
        "注意力softmax：vanilla，或每头多一个无值的分数（attention sink）：为0或可学习。",
        "parameters",
        checkpoint=COMPARED,
    )

    def derive_latent_attention(self, given):
        """Fill what follows from `multi_latent_attention`, or it from `attention_type`.

        Args:
            given (set[str]): fields that were given.
        """
        if self.attention_type == MULTI_LATENT and "multi_latent_attention" not in given:
            self.fill(multi_latent_attention=True)
        if not self.multi_latent_attention:
            return
        if "attention_type" not in given:
            self.fill(attention_type=MULTI_LATENT)
        if self.kv_channels is None:
            self.fill(kv_channels=self.qk_head_dim + self.qk_pos_emb_head_dim)
        if "rotary_interleaved" not in given:
            self.fill(rotary_interleaved=True)
