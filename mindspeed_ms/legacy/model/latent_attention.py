"""MultiLatentAttention (MLA, DeepSeek): attention with compressed keys and values. Source: Megatron core's class."""

import math

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.tensor_parallel.layers import build_linear
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.core.tensor_parallel.whole_linear import WholeLinearLayer
from mindspeed_ms.layout.describers.latent_attention import latent_linears, latent_norms
from mindspeed_ms.layout.layer_parameters import WholeLinear
from mindspeed_ms.legacy.model.attention import attend, check_context_parallel, check_inference
from mindspeed_ms.legacy.model.core_attention import core_attention_of, has_explicit_band
from mindspeed_ms.legacy.model.enums import AttnMaskType, AttnType, to_enum
from mindspeed_ms.legacy.model.norms import get_norm
from mindspeed_ms.legacy.model.parts import LayerCell, register_part
from mindspeed_ms.legacy.model.rotary_pos_embedding import apply_rotary_pos_emb, to_rotary_tables
from mindspeed_ms.legacy.model.rotary_scaling import score_factor


@register_part("attention", "multi_latent")
class MultiLatentAttention(LayerCell):
    """Self attention whose keys and values are expanded from compressed ones, with its heads cut over the tensor-parallel
    group.

    A head's key is an expanded part without positions, and a part with rotary positions that all heads share. With a cache
    (`inference_params`) only the compressed keys and values and the shared part are kept: queries go to the space of the
    compressed ones by the weight that would expand keys.

    Args:
        config (TransformerConfig): sizes, ranks, biases, `use_flash_attention`.
        layer_number (int): global number of the layer, from 1.
        attention_type (AttnType): `self_attn`.
        attn_mask_type (AttnMaskType): what a missing mask means, see `attention_mask`.

    Inputs: hidden_states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism), attention_mask or None,
    inference_params or None, rotary_pos_emb as `ParallelAttention`, of the part with positions. Outputs: `[s, b, h]`, and the
    output projection's bias or None, which the caller adds.

    Raises:
        ValueError: cross attention, heads that the tensor-parallel size does not divide, context parallelism; in a call,
            no positions, or `inference_params` in training or with a mask.
    """

    def __init__(self, config, layer_number, attention_type=AttnType.self_attn, attn_mask_type=AttnMaskType.padding):
        super().__init__(config)
        if to_enum(AttnType, attention_type) != AttnType.self_attn:
            raise ValueError("multi_latent_attention is self attention: it has no cross attention.")
        self.layer_number, self.attn_mask_type = max(1, layer_number), to_enum(AttnMaskType, attn_mask_type)
        config, described, model = self.config, self.described, self.described.model
        size = parallel_state.get_tensor_model_parallel_world_size()
        self.heads = divide(model.num_attention_heads, size, "num_attention_heads", "tensor_model_parallel_size")
        if parallel_state.get_context_parallel_world_size() > 1:
            check_context_parallel(AttnType.self_attn, self.config)
        self.plain_width, self.rotary_width = model.qk_head_dim, model.qk_pos_emb_head_dim
        self.value_width, self.latent_rank = model.v_head_dim, model.kv_lora_rank
        self.sequence_parallel = self.settings.sequence_parallel
        self.compresses_queries = bool(model.q_lora_rank)
        for name, linear in latent_linears(model).items():
            if isinstance(linear, WholeLinear):
                cell = WholeLinearLayer(linear, described)
            elif linear.column:
                cell = build_linear(linear, described, gather_output=False)
            else:
                cell = build_linear(linear, described, input_is_parallel=True, skip_bias_add=True)
            setattr(self, name, cell)
        self.has_norms = model.qk_layernorm
        for name, norm in latent_norms(model).items():
            setattr(self, name, get_norm(described, width=norm.width, eps=config.qk_layernorm_epsilon))
        scale = score_factor(config.rope_scaling) / math.sqrt(model.head_dim)
        self.core_attention = core_attention_of(self.layer_number, described, self.attn_mask_type, scale)
        self.rotary_interleaved, self.apply_rope_fusion = config.rotary_interleaved, config.apply_rope_fusion
        self.recompute_core_attention = False
        self.has_explicit_band = has_explicit_band(config)

    def recompute_selectively(self):
        """The core attention runs again in the backward."""
        self.recompute_core_attention = True

    def construct(self, hidden_states, attention_mask=None, inference_params=None, rotary_pos_emb=None):
        """See the class."""
        if rotary_pos_emb is None:
            raise ValueError("multi_latent_attention has rotary positions: set position_embedding_type rope.")
        query, query_rotary = self._queries(hidden_states)
        latent, key_rotary = self._latents(hidden_states)
        query_table, key_table = to_rotary_tables(rotary_pos_emb, self.rotary_interleaved)
        query_rotary = apply_rotary_pos_emb(query_rotary, query_table, self.apply_rope_fusion)
        key_rotary = apply_rotary_pos_emb(key_rotary, key_table, self.apply_rope_fusion)
        if inference_params is not None:
            check_inference(self, attention_mask)
            if inference_params.keeps_keys:
                context = self._attend_latents(inference_params, query, query_rotary, latent, key_rotary)
                return self.out_proj(context)
        query = ops.cat((query, query_rotary), -1)
        key, value = self._expanded(latent)
        key = ops.cat_shared(key, key_rotary)
        if inference_params is not None:
            context = inference_params.attend(self.core_attention, query, key, value)
        elif self.recompute_core_attention and self.training:
            context = checkpoint(attend, False, self.core_attention, query, key, value, attention_mask)
        else:
            context = attend(self.core_attention, query, key, value, attention_mask)
        return self.out_proj(context)

    def _queries(self, hidden_states):
        """Parts of the queries without and with positions, [s, b, n, d] each."""
        if self.compresses_queries:
            compressed = self.q_down_proj(hidden_states)
            query, _ = self.q_up_proj(self.q_layernorm(compressed) if self.has_norms else compressed)
        else:
            query, _ = self.q_proj(hidden_states)
        query = query.reshape((*query.shape[:2], self.heads, self.plain_width + self.rotary_width))
        return _split(query, self.plain_width)

    def _latents(self, hidden_states):
        """Compressed keys and values [s, b, r] (under sequence parallelism [s / tp, b, r]), and the shared part of the keys
        [s, b, 1, d] before its rotation."""
        latent, key = _split(self.kv_down_proj(hidden_states), self.latent_rank)
        if self.sequence_parallel:
            key = gather_from_sequence_parallel_region(key)
        else:
            key = copy_to_tensor_model_parallel_region(key)  # its gradient is the sum over the heads of all ranks
        latent = self.kv_layernorm(latent) if self.has_norms else latent
        return latent, key.reshape((*key.shape[:2], 1, self.rotary_width))

    def _expanded(self, latent):
        """Keys without positions and values of each head."""
        expanded, _ = self.kv_up_proj(latent)
        return _split(expanded.reshape((*expanded.shape[:2], self.heads, -1)), self.plain_width)

    def _attend_latents(self, inference_params, query, query_rotary, latent, key_rotary):
        """Context [s, b, n * dv] over a cache of compressed keys and values."""
        length, batch = query.shape[:2]
        weight = cast(self.kv_up_proj.weight, query.dtype).reshape((self.heads, -1, self.latent_rank))
        key_weight = mint.narrow(weight, 1, 0, self.plain_width).contiguous()
        value_weight = mint.narrow(weight, 1, self.plain_width, self.value_width).contiguous()
        query = _heads_last(ops.batch_matmul(_heads_first(query), key_weight), length)
        query = ops.cat((query, query_rotary), -1)
        latent = ops.cat((latent.reshape((length, batch, 1, self.latent_rank)), key_rotary), -1)
        context = inference_params.attend(self.core_attention, query, latent, None, value_width=self.latent_rank)
        context = _heads_first(context.reshape((length, batch, self.heads, self.latent_rank)))
        context = _heads_last(ops.batch_matmul(context, value_weight, transpose_b=True), length)
        return context.reshape((length, batch, self.heads * self.value_width))


def _split(x, width):
    """The first `width` elements of the last dimension, and the rest."""
    return mint.narrow(x, -1, 0, width).contiguous(), mint.narrow(x, -1, width, x.shape[-1] - width).contiguous()


def _heads_first(x):
    """[s, b, n, d] to [n, s * b, d]."""
    return mint.transpose(x.reshape((-1, *x.shape[2:])), 0, 1).contiguous()


def _heads_last(x, length):
    """[n, s * b, d] to [s, b, n, d]."""
    x = mint.transpose(x, 0, 1).contiguous()
    return x.reshape((length, -1, *x.shape[1:]))
