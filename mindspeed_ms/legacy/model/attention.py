"""Attention: ParallelAttention (projections, choice of the core), CoreAttention, FlashAttention. Source: Megatron's classes."""

import math
from dataclasses import replace

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.context_parallel import VisibleKeys, context_parallel_attention
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.layers import build_linear
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.layout.describers.attention import attention_linears, attention_sinks
from mindspeed_ms.legacy.model.attention_mask import expand_attention_mask, is_causal
from mindspeed_ms.legacy.model.enums import AttnMaskType, AttnType, to_enum
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.norms import get_norm
from mindspeed_ms.legacy.model.parts import LayerCell, register_part
from mindspeed_ms.legacy.model.rotary_pos_embedding import apply_rotary_pos_emb, to_rotary_tables
from mindspeed_ms.ops.checks import sparse_band, visible_band


def _expanded(mask, query, key, mask_type):
    return expand_attention_mask(mask, query.shape[1], query.shape[0], key.shape[0], mask_type)


class CoreAttention(Module):
    """Core attention `softmax(q k^T / sqrt(d)) v`, with the whole score matrix in memory.

    Args:
        layer_number (int): from 1; divides the scores before, and multiplies them inside the softmax, under
            `apply_query_key_layer_scaling`.
        config (TransformerConfig): head size, `attention_dropout`, `attention_softmax_in_fp32`.
        attn_mask_type (AttnMaskType): what a missing mask means, see `attention_mask`.
        scale (Optional[float]): factor of the scores; None: 1 / sqrt(d).

    Inputs: query `[sq, b, n, d]`, key `[sk, b, g, d]` and value `[sk, b, g, dv]` with n a multiple of g, mask (see
    `expand_attention_mask`) or None, sinks `[n]` (see `ops.core_attention`) or None. Output: `[sq, b, n * dv]`.
    """

    names_are_global = False

    def __init__(self, layer_number, config, attn_mask_type=AttnMaskType.padding, scale=None):
        super().__init__(config)
        self.scale = scale
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = to_enum(AttnMaskType, attn_mask_type)
        config = self.config
        self.attention_dropout = config.attention_dropout
        self.softmax_scale = float(self.layer_number) if config.apply_query_key_layer_scaling else 1.0
        self.softmax_in_fp32 = config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling
        self.explicit_band = _explicit_band(config)
        self.window = _window_of(self)

    def band(self, mask, length):
        """What else than the mask hides keys, for sequences of `length` tokens that are cut over ranks.

        Returns:
            (mask, lower, upper): the mask, or None where the settings say that it does not count; the query at position i
                sees positions i + lower to i + upper.
        """
        causal = is_causal(self.attn_mask_type, mask)
        pre_tokens, next_tokens = None if self.window is None else self.window - 1, None
        if self.explicit_band is not None:
            mask, causal, pre_tokens, next_tokens = self.explicit_band.resolve(mask, causal)
        return mask, *visible_band(length, length, causal, pre_tokens, next_tokens)

    def construct(self, query, key, value, attention_mask=None, sinks=None):
        """See the class."""
        mask = _expanded(attention_mask, query, key, self.attn_mask_type)
        causal = is_causal(self.attn_mask_type, mask)
        scale = 1.0 / (math.sqrt(query.shape[-1]) * self.softmax_scale)
        if self.scale is not None:
            scale = self.scale / self.softmax_scale
        probability, keep = 0.0, None
        if self.training and self.attention_dropout > 0.0:
            probability = self.attention_dropout
            keep = _keep_mask((query.shape[1], query.shape[2], query.shape[0], key.shape[0]), 1.0 - probability)
        pre_tokens, next_tokens = None if self.window is None else self.window - 1, None
        if self.explicit_band is not None:
            mask, causal, pre_tokens, next_tokens = self.explicit_band.resolve(mask, causal)
        return ops.core_attention(
            query,
            key,
            value,
            mask,
            scale=scale,
            causal=causal,
            dropout_p=probability,
            dropout_mask=keep,
            softmax_in_fp32=self.softmax_in_fp32,
            softmax_scale=self.softmax_scale,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            sinks=sinks,
        )


def _keep_mask(shape, keep_probability):
    """Keep mask of attention dropout, from the state that differs between tensor-parallel ranks, as their heads do."""
    with get_rng_tracker().fork() as state:
        return state.keep_mask(shape, keep_probability)


class _Band:
    """Attention band for plain attention: `pre_tokens`, `next_tokens` and `sparse_mode` of `fa_config`."""

    def __init__(self, fa_config):
        self.pre_tokens, self.next_tokens = fa_config.pre_tokens, fa_config.next_tokens
        self.sparse_mode = fa_config.sparse_mode

    def resolve(self, mask, causal):
        """`(mask, causal, pre_tokens, next_tokens)` with the meaning that the fused operator gives the settings."""
        if self.sparse_mode == 1:
            return mask, causal, None, None
        if self.sparse_mode in (2, 3):
            return None, True, None, None
        if self.sparse_mode == 4:
            return None, False, self.pre_tokens, self.next_tokens
        return mask, causal, self.pre_tokens, self.next_tokens


def _explicit_band(config):
    """Band limits that the user set in `fa_config`; None if only defaults (plain attention ignores those)."""
    given = config.fa_config.model_fields_set & {"pre_tokens", "next_tokens", "sparse_mode"}
    return _Band(config.fa_config) if given else None


def _window_of(core):
    """Sliding window of the core attention's layer: int, or None.

    Raises:
        ValueError: settings of `fa_config` that say something else.
    """
    window = core.described.model.window_of(core.layer_number - 1)
    if window is not None and has_explicit_band(core.config):
        raise ValueError(
            "sliding_window cannot be combined with pre_tokens, next_tokens or sparse_mode of fa_config: it sets them itself."
        )
    return window


class FlashAttention(Module):
    """Flash attention, which holds no `[s, s]` matrix; inputs and output as `CoreAttention`.

    `fa_config` gives `pre_tokens`, `next_tokens`, `sparse_mode`, `input_layout` and `keep_prob`. Where a causal mask is
    meant and none is given, the operator's own causal (or, with a limited `pre_tokens`, band) mode is used.

    Raises:
        ValueError: query-key layer scaling, which needs the scores themselves.
    """

    names_are_global = False

    def __init__(self, layer_number, config, attn_mask_type=AttnMaskType.padding, scale=None):
        super().__init__(config)
        config, self.scale = self.config, scale
        if config.apply_query_key_layer_scaling:
            raise ValueError(
                "use_flash_attention cannot be combined with apply_query_key_layer_scaling: the fused operator keeps "
                "its scores in float32, so leave the scaling off."
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = to_enum(AttnMaskType, attn_mask_type)
        fa_config, self.window = config.fa_config, _window_of(self)
        self.pre_tokens, self.next_tokens = fa_config.pre_tokens, fa_config.next_tokens
        if self.window is not None:
            self.pre_tokens = self.window - 1
        self.sparse_mode, self.input_layout = fa_config.sparse_mode, fa_config.input_layout
        self.keep_prob = 1.0 - config.attention_dropout if fa_config.keep_prob is None else fa_config.keep_prob

    def band(self, mask, length):
        """See `CoreAttention.band`."""
        mode, next_tokens = self._mode(mask, length)
        lower, upper, counts = sparse_band(mode, mask is not None, length, length, self.pre_tokens, next_tokens)
        return mask if counts else None, lower, upper

    def _mode(self, mask, key_length):
        """(sparse mode, next_tokens) of the operator."""
        mode, next_tokens = self.sparse_mode, self.next_tokens
        if mode < 2 and is_causal(self.attn_mask_type, mask):
            return self._causal_mode(mask, key_length)
        if mask is None and self.window is not None:
            return 4, key_length  # a band that looks ahead
        return mode, next_tokens

    def construct(self, query, key, value, attention_mask=None, sinks=None):
        """See the class."""
        mask = _expanded(attention_mask, query, key, self.attn_mask_type)
        mode, next_tokens = self._mode(mask, key.shape[0])
        keep_prob = self.keep_prob if self.training else 1.0
        return ops.flash_attention(
            query,
            key,
            value,
            mask if mode < 2 else None,
            scale=self.scale,
            pre_tokens=self.pre_tokens,
            next_tokens=next_tokens,
            sparse_mode=mode,
            input_layout=self.input_layout,
            keep_prob=keep_prob,
            dropout_seed=_dropout_seed() if keep_prob < 1.0 else None,
            sinks=sinks,
        )

    def _causal_mode(self, mask, key_length):
        """(sparse mode, next_tokens) for causal attention."""
        next_tokens = min(self.next_tokens, 0)
        if mask is not None:
            return 0, next_tokens  # mask and band
        return (2, next_tokens) if self.pre_tokens >= key_length and next_tokens == 0 else (4, next_tokens)


def _dropout_seed():
    """Dropout seed for one call, drawn from the state that differs between tensor-parallel ranks."""
    with get_rng_tracker().fork() as state:
        return state.draw_seed()


def has_explicit_band(config):
    """Whether `fa_config` of a TransformerConfig limits which tokens a token attends to."""
    return _explicit_band(config) is not None


def core_attention_of(layer_number, described, attn_mask_type, scale=None):
    """The core attention that the configuration asks for; arguments as `CoreAttention`."""
    core = FlashAttention if described.config.use_flash_attention else CoreAttention
    return core(layer_number, described, attn_mask_type, scale)


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
            mixed, _ = self.qkv_proj(hidden_states)
            query, key, value = ops.split_query_key_value(mixed, self.groups, self.queries_per_group, self.head_size)
            if self.qk_layernorm:
                query, key = self.q_layernorm(query), self.k_layernorm(key)
        else:
            query, key, value = self._cross_query_key_value(hidden_states, encoder_output)
        query_table, key_table = to_rotary_tables(rotary_pos_emb, self.rotary_interleaved)
        query = apply_rotary_pos_emb(query, query_table, self.apply_rope_fusion)
        key = apply_rotary_pos_emb(key, key_table, self.apply_rope_fusion)
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
