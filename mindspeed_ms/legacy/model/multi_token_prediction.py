"""Layers of multi-token prediction (MTP). Source: Megatron core's `multi_token_prediction.py`."""

from mindspore import dtype, mint, nn

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.autograd import detach
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import attach_auxiliary_loss, record_auxiliary
from mindspeed_ms.core.tensor_parallel.layers import build_linear
from mindspeed_ms.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.layout.describers.gpt import mtp_projection
from mindspeed_ms.legacy.model.enums import AttnMaskType, LayerType
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.norms import get_norm
from mindspeed_ms.legacy.model.transformer_layer import ParallelTransformerLayer


def roll(tensor):
    """Tensor `[b, s]` moved one place to the front along the sequence; the last column is 0."""
    return mint.cat((mint.narrow(tensor, 1, 1, tensor.shape[1] - 1), storage.zeros((tensor.shape[0], 1), tensor.dtype)), 1)


class MultiTokenPredictionLayer(Module):
    """Layer that predicts one token further: `norm(layer(eh_proj([enorm(embedding), hnorm(hidden)])))`.

    Args:
        config (TransformerConfig): the model; the transformer layer is like its last one.
        number (int): places that its layer predicts ahead of the model, from 1.

    Inputs: embedding and hidden_states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism), attention_mask,
    rotary_pos_emb as of a transformer layer. Output: the same shape.
    """

    names_are_global = False

    def __init__(self, config, number):
        super().__init__(config)
        described, model = self.described, self.described.model
        self.sequence_parallel = self.settings.sequence_parallel
        self.enorm, self.hnorm = get_norm(described), get_norm(described)
        self.eh_proj = build_linear(mtp_projection(model), described, gather_output=False)
        self.transformer_layer = ParallelTransformerLayer(
            described, model.stages.num_layers, LayerType.encoder, AttnMaskType.causal
        )
        self.transformer_layer.mlp.set_layer_number(model.stages.num_layers + number)  # of its own in the metrics
        self.final_layernorm = get_norm(described)

    def construct(self, embedding, hidden_states, attention_mask=None, rotary_pos_emb=None):
        """See the class."""
        joined = mint.cat((self.enorm(embedding), self.hnorm(hidden_states)), -1)
        # Every rank goes on with the same tensor, so the gradient is cut: Megatron's gather would add tp equal ones.
        hidden_states = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0])
        if self.sequence_parallel:
            hidden_states = scatter_to_sequence_parallel_region(hidden_states)
        hidden_states = self.transformer_layer(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
        return self.final_layernorm(hidden_states)


class MultiTokenPrediction(Module):
    """The `mtp_num_layers` layers of multi-token prediction, on the last stage; used in training only.

    Layer k predicts from the hidden states of layer k - 1 (the first one: of the model) and the embedding of the token k
    places ahead. The mean of the layers' losses, times `mtp_loss_scaling_factor`, is added to the training; each is
    reported as "mtp_k loss".

    Args:
        config (TransformerConfig): the model.

    Inputs: language_model (TransformerLanguageModel), loss_of (function of hidden states, labels and mask), hidden_states
    `[s, b, h]` of the final norm; the others as of GPTModel. Output: hidden_states.

    Raises:
        ValueError: context parallelism.
    """

    def __init__(self, config):
        super().__init__(config)
        if parallel_state.get_context_parallel_world_size() > 1:
            raise ValueError(
                f"mtp_num_layers {self.config.mtp_num_layers} cannot be combined with context_parallel_size above 1: the next "
                "token of a part of the sequence is on another rank."
            )
        self.layers = nn.CellList(
            [MultiTokenPredictionLayer(self.described, number) for number in range(1, self.config.mtp_num_layers + 1)]
        )
        self.scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        self.per_token = self.config.training_config.calculate_per_token_loss
        self.recomputes = self.config.recompute_granularity == "full"
        self.distribute_saved_activations = self.config.distribute_saved_activations

    def construct(
        self, language_model, loss_of, hidden_states, tokens, position_ids, attention_mask, tokentype_ids, labels, loss_mask
    ):
        """See the class."""
        result = hidden_states
        rotary = language_model.rotary_table(tokens.shape[1], position_ids)
        if attention_mask is not None and hasattr(attention_mask, "asnumpy"):
            attention_mask = language_model.encoder.expanded(attention_mask, hidden_states)
        if loss_mask is None:
            loss_mask = mint.ones_like(ops.cast(labels, dtype.float32))
        for number, layer in enumerate(self.layers, 1):
            tokens, labels, loss_mask = roll(tokens), roll(labels), roll(loss_mask)
            embedding = language_model.embedding(tokens, position_ids, tokentype_ids)
            hidden_states = self._run(layer, embedding, hidden_states, attention_mask, rotary)
            loss = loss_of(hidden_states, labels, loss_mask)
            record_auxiliary(f"mtp_{number} loss", detach(loss))
            if self.per_token:
                loss = loss * ops.total(ops.cast(loss_mask, dtype.float32))
            result = attach_auxiliary_loss(result, loss * self.scale)
        return result

    def _run(self, layer, embedding, hidden_states, attention_mask, rotary):
        def run(embedding, hidden_states):
            return layer(embedding, hidden_states, attention_mask, rotary)

        if self.recomputes:
            return checkpoint(run, self.distribute_saved_activations, embedding, hidden_states)
        return run(embedding, hidden_states)
