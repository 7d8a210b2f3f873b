"""Core attention of given queries, keys and values: CoreAttention, FlashAttention. Source: Megatron's classes."""

import math

from mindspeed_ms import ops
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.legacy.model.attention_mask import expand_attention_mask, is_causal
from mindspeed_ms.legacy.model.enums import AttnMaskType, to_enum
from mindspeed_ms.legacy.model.module import Module
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
