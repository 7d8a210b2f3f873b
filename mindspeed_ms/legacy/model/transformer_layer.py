"""Transformer layer: norms, attention and feed-forward block. Source: Megatron's `ParallelTransformerLayer`."""

from contextlib import nullcontext

from mindspeed_ms import ops
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.layout.describers.gpt import layer_norms
from mindspeed_ms.legacy.model import attention, latent_attention, mlp, moe  # noqa: F401  (they register their cells)
from mindspeed_ms.legacy.model.enums import AttnMaskType, AttnType, LayerType, to_enum
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.norms import UnaddedSum, added_and_normed, get_norm
from mindspeed_ms.legacy.model.parts import cell_of


def hidden_rng_context(sequence_parallel):
    """Context with the random state for dropout of hidden states: under sequence parallelism the rank's own, else shared."""
    return get_rng_tracker().fork() if sequence_parallel else nullcontext()


def draw_keep_mask(shape, probability, sequence_parallel):
    """Keep mask for dropout of hidden states with `probability`."""
    with hidden_rng_context(sequence_parallel):
        return get_rng_tracker().current.keep_mask(tuple(shape), 1.0 - probability)


class ParallelTransformerLayer(Module):
    """Transformer layer: `x + dropout(attention(norm(x)))`, then the same with the feed-forward block.

    With `use_sandwich_norm` another norm follows each block's dropout; with `apply_residual_connection_post_norm` the
    block's output is added to the normed input.

    Args:
        config (TransformerConfig): the model.
        layer_number (int): global number, from 1.
        layer_type (LayerType): `encoder`; the types with cross attention belong to models that are not built here.
        self_attn_mask_type (AttnMaskType): what a missing mask means.
        drop_path_rate (float): must be 0; stochastic depth is for vision models.

    Inputs: hidden_states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism) or in inference an `UnaddedSum`,
    attention_mask, rotary_pos_emb. Output: the same shape, in the dtype of the residual stream; with `gives_sum`, for
    inference, an `UnaddedSum` where nothing stands between it and the next norm.

    Raises:
        ValueError: another layer type, a drop path.
    """

    names_are_global = False

    def __init__(
        self, config, layer_number, layer_type=LayerType.encoder, self_attn_mask_type=AttnMaskType.padding, drop_path_rate=0.0
    ):
        super().__init__(config)
        if to_enum(LayerType, layer_type) != LayerType.encoder:
            raise ValueError(f"layer_type {layer_type} is part of encoder-decoder models; use LayerType.encoder.")
        if drop_path_rate:
            raise ValueError(f"drop_path_rate {drop_path_rate} is stochastic depth of vision models; it must be 0.")
        self.layer_number = layer_number
        config, described, model = self.config, self.described, self.described.model
        self.hidden_dropout = config.hidden_dropout
        self.sequence_parallel = self.settings.sequence_parallel
        self.residual_post_norm = config.apply_residual_connection_post_norm
        norms = layer_norms(model)
        self.input_norm = get_norm(described, norms["input_norm"].scale)
        attention_cell = cell_of("attention", model.attention_type)
        self.attention = attention_cell(described, layer_number, AttnType.self_attn, self_attn_mask_type)
        self.post_attention_norm = get_norm(described, norms["post_attention_norm"].scale)
        self.mlp = cell_of("mlp", model.mlp_kind(layer_number - 1))(described)
        self.mlp.set_layer_number(layer_number)
        self.sandwich = model.use_sandwich_norm
        if self.sandwich:
            self.attn_post_norm = get_norm(described, norms["attn_post_norm"].scale)
            self.ffn_post_norm = get_norm(described, norms["ffn_post_norm"].scale)

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        enc_dec_attn_mask=None,
        retriever_input=None,
        retriever_output=None,
        retriever_attn_mask=None,
        inference_params=None,
        rotary_pos_emb=None,
        gives_sum=False,
    ):
        """See the class."""
        if any(
            value is not None
            for value in (encoder_output, enc_dec_attn_mask, retriever_input, retriever_output, retriever_attn_mask)
        ):
            raise ValueError("encoder and retriever inputs must be None: this layer attends to itself only.")
        hidden_states, normed = added_and_normed(self.input_norm, hidden_states)
        output, bias = self.attention(normed, attention_mask, inference_params=inference_params, rotary_pos_emb=rotary_pos_emb)
        residual = normed if self.residual_post_norm else hidden_states
        adds_late = inference_params is not None
        hidden_states = self._add(output, bias, residual, self.attn_post_norm if self.sandwich else None, adds_late)
        hidden_states, normed = added_and_normed(self.post_attention_norm, hidden_states)
        output, bias = self.mlp(normed)
        residual = normed if self.residual_post_norm else hidden_states
        return self._add(output, bias, residual, self.ffn_post_norm if self.sandwich else None, gives_sum)

    def _add(self, output, bias, residual, post_norm, adds_late):
        """Residual addition `residual + post_norm(dropout(output + bias))`; with `adds_late` what the next norm can add."""
        probability = self.hidden_dropout if self.training else 0.0
        keep = draw_keep_mask(output.shape, probability, self.sequence_parallel) if probability > 0.0 else None
        bias = cast(bias, output.dtype)
        if post_norm is None and keep is None and adds_late:
            return UnaddedSum(output, bias, residual)
        if post_norm is None:
            return ops.bias_dropout_add(output, bias, residual, probability, keep)
        output = output if bias is None else ops.add_bias(output, bias)
        return ops.residual_add(post_norm(ops.dropout(output, probability, keep)), residual)
