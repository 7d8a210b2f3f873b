"""Attention with its projections: ParallelAttention, self or cross. Source: Megatron's class."""

from dataclasses import replace

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.context_parallel import VisibleKeys, context_parallel_attention
from mindspeed_ms.core.tensor_parallel.layers import build_linear
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.layout.describers.attention import attention_linears, attention_sinks
from mindspeed_ms.legacy.model.core_attention import core_attention_of, has_explicit_band
from mindspeed_ms.legacy.model.enums import AttnMaskType, AttnType, to_enum
from mindspeed_ms.legacy.model.norms import get_norm
from mindspeed_ms.legacy.model.parts import LayerCell, register_part
from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryTable, rotate


def check_inference(attention, attention_mask):
    """Raise ValueError unless an attention cell may be given inference_params.

    Args:
        attention (LayerCell): with `attn_mask_type` and `has_explicit_band`.
        attention_mask: of the call.
    """
    if attention.training or attention_mask is not None or attention.attn_mask_type != AttnMaskType.causal:
        raise ValueError(
            "inference_params are for causal self attention without attention_mask, outside of training: leave the mask "
            "out, or call set_train(False)."
        )
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError("inference_params cannot be combined with context_parallel_size above 1: load the model without it.")
    if attention.has_explicit_band:
        raise ValueError(
            "inference_params cannot be combined with pre_tokens, next_tokens or sparse_mode of fa_config: set sliding_window."
        )


@register_part("attention", "self_attn")
class ParallelAttention(LayerCell):
    """Self or cross attention with its heads cut over the tensor-parallel group.

    Args:
        config (TransformerConfig): sizes, biases, `use_flash_attention`.
        layer_number (int): global number of the layer, from 1.
        attention_type (AttnType): `self_attn` or `cross_attn`.
        attn_mask_type (AttnMaskType): what a missing mask means, see `attention_mask`.

    Inputs: hidden_states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism), attention_mask or None,
    encoder_output `[sk, b, h]` for cross attention, rotary_pos_emb (angles `[s, 1, 1, rot]`, a pair of them for
    queries and keys, or a `RotaryTable`), inference_params (how to attend without training, see
    `inference.inference_params`) or None. Outputs: `[s, b, h]`, and the output projection's bias or None, which the caller
    adds.

    Raises:
        ValueError: heads or groups that the tensor-parallel size does not divide, grouped queries in cross attention,
            attention dropout or cross attention under context parallelism, unknown kinds; in a call, `inference_params` in
            training, with a mask, under context parallelism or for cross attention.
    """

    def __init__(self, config, layer_number, attention_type=AttnType.self_attn, attn_mask_type=AttnMaskType.padding):
        super().__init__(config)
        self.layer_number = max(1, layer_number)
        self.attention_type = to_enum(AttnType, attention_type)
        self.attn_mask_type = to_enum(AttnMaskType, attn_mask_type)
        config, model = self.config, self.described.model
        heads, groups, self.head_size = model.num_attention_heads, model.query_groups, model.head_dim
        self.queries_per_group = divide(heads, groups, "num_attention_heads", "num_query_groups")
        tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
        divide(heads, tensor_parallel_size, "num_attention_heads", "tensor_model_parallel_size")
        self.groups = divide(groups, tensor_parallel_size, "num_query_groups", "tensor_model_parallel_size")
        if parallel_state.get_context_parallel_world_size() > 1:
            check_context_parallel(self.attention_type, config)
        self._create_projections(model)
        self.core_attention = core_attention_of(self.layer_number, self.described, self.attn_mask_type)
        self.recompute_core_attention = False
        self.has_explicit_band = has_explicit_band(config)
        self._create_sinks(model, tensor_parallel_size)
        self.rotary_interleaved = config.rotary_interleaved
        self.apply_rope_fusion = config.apply_rope_fusion

    def recompute_selectively(self):
        """The core attention runs again in the backward."""
        self.recompute_core_attention = True

    def _create_sinks(self, model, tensor_parallel_size):
        """Scores of each head that have no value: learned ones, zeros, or none."""
        self.has_learned_sinks = model.has_learned_sinks
        self._constant_sinks = None
        if model.has_learned_sinks:
            self.create_parameters(attention_sinks(model).describe(self.settings.part()))
        elif model.softmax_type == "off-by-one":
            self._constant_sinks = (storage.zeros((model.num_attention_heads // tensor_parallel_size,), "float32"),)

    @property
    def _sinks(self):
        if self.has_learned_sinks:
            return self.softmax_offset
        return self._constant_sinks and self._constant_sinks[0]

    def _attend(self, query, key, value, attention_mask):
        sinks = () if self._sinks is None else (self._sinks,)  # a core of one's own need not know of them
        return attend(self.core_attention, query, key, value, attention_mask, *sinks)

    def _create_projections(self, model):
        linears, config = attention_linears(model), self.described
        qkv = linears["qkv_proj"]
        if self.attention_type == AttnType.self_attn:
            self.qkv_proj = build_linear(qkv, config, gather_output=False)
        elif self.queries_per_group > 1:
            raise ValueError("cross attention cannot be combined with group_query_attention.")
        else:
            width = model.attention_width
            self.q_proj = build_linear(replace(qkv, output_size=width, grouping=None), config, gather_output=False)
            self.kv_proj = build_linear(replace(qkv, output_size=2 * width, grouping=None), config, gather_output=False)
        self.out_proj = build_linear(linears["out_proj"], config, input_is_parallel=True, skip_bias_add=True)
        self.qk_layernorm = model.qk_layernorm and self.attention_type == AttnType.self_attn
        if self.qk_layernorm:
            eps = self.config.qk_layernorm_epsilon
            self.q_layernorm, self.k_layernorm = (get_norm(config, over_heads=True, eps=eps) for _ in range(2))

    def construct(self, hidden_states, attention_mask=None, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        """See the class."""
        if self.attention_type == AttnType.self_attn:
            query, key, value = self._query_key_value(hidden_states, rotary_pos_emb)
        else:
            query, key, value = self._cross_query_key_value(hidden_states, encoder_output)
            query, key = rotate(query, key, rotary_pos_emb, self.rotary_interleaved, self.apply_rope_fusion)
        if inference_params is not None:
            if self.attention_type != AttnType.self_attn:
                raise ValueError("inference_params are for self attention.")
            check_inference(self, attention_mask)
            context = inference_params.attend(self.core_attention, query, key, value, self._sinks)
        elif self.recompute_core_attention and self.training:
            context = checkpoint(self._attend, False, query, key, value, attention_mask)
        else:
            context = self._attend(query, key, value, attention_mask)
        return self.out_proj(context)

    def _query_key_value(self, hidden_states, rotary_pos_emb):
        mixed, _ = self.qkv_proj(hidden_states)
        sizes = self.groups, self.queries_per_group, self.head_size
        if isinstance(rotary_pos_emb, RotaryTable) and not self.qk_layernorm:  # a norm would stand between
            return ops.split_query_key_value(mixed, *sizes, rotary_pos_emb, self.apply_rope_fusion)
        query, key, value = ops.split_query_key_value(mixed, *sizes)
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return *rotate(query, key, rotary_pos_emb, self.rotary_interleaved, self.apply_rope_fusion), value

    def _cross_query_key_value(self, hidden_states, encoder_output):
        if encoder_output is None:
            raise ValueError("cross attention needs encoder_output [sk, b, h].")
        query, _ = self.q_proj(hidden_states)
        mixed, _ = self.kv_proj(encoder_output)
        # per head [k, v]
        key, value = _split_pairs(mixed, self.groups, self.head_size)
        return query.reshape((*query.shape[:2], self.groups, self.head_size)), key, value


def attend(core, query, key, value, attention_mask, *sinks):
    """Context of the core attention cell `core`, `[s, b, n * dv]`: over sequences that are cut over ranks, or with a mask of
    packed documents, by context parallelism, which takes the settings of the cell; else by the cell itself.

    Args:
        core (CoreAttention or FlashAttention): or a cell with the same `band` and, if it has one of its own, `scale`.
        query, key, value, attention_mask: as of the cell; the mask may be a `VisibleKeys`.
        sinks (Tensor): none, or `[n]`, one more score of each head without a value.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1 and not isinstance(attention_mask, VisibleKeys):
        return core(query, key, value, attention_mask, *sinks)
    mask, lower, upper = core.band(attention_mask, query.shape[0] * ranks)
    return context_parallel_attention(query, key, value, mask, lower, upper, getattr(core, "scale", None), *sinks)


def check_context_parallel(attention_type, config):
    """Refuse what attention over cut sequences cannot do; the check of a configuration says the same before."""
    if attention_type != AttnType.self_attn:
        raise ValueError("cross attention cannot be combined with context_parallel_size above 1.")
    keep_prob = config.fa_config.keep_prob
    if config.attention_dropout > 0.0 or (config.use_flash_attention and keep_prob is not None and keep_prob < 1.0):
        raise ValueError(
            f"attention_dropout {config.attention_dropout} cannot be combined with context_parallel_size above 1: set it to 0."
        )


def _split_pairs(mixed, heads, head_size):
    """`[s, b, heads * 2 * d]` to two `[s, b, heads, d]`."""
    pairs = mixed.reshape((*mixed.shape[:2], heads, 2, head_size))
    return pairs[:, :, :, 0].contiguous(), pairs[:, :, :, 1].contiguous()
