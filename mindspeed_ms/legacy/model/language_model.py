"""TransformerLanguageModel: embedding, layers and head weight. Source: Megatron's legacy `language_model.py`."""

from dataclasses import replace

from mindspeed_ms.config.availability import require_model_available
from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel import local_position_ids
from mindspeed_ms.core.tensor_parallel.cell import set_description
from mindspeed_ms.core.tensor_parallel.layers import build_linear
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.layout.describers.gpt import as_tied_copy, output_layer
from mindspeed_ms.layout.divisibility import check_model
from mindspeed_ms.legacy.model.embedding import Embedding
from mindspeed_ms.legacy.model.enums import AttnMaskType, to_enum
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding
from mindspeed_ms.legacy.model.transformer_block import ParallelTransformer

__all__ = ["Embedding", "TransformerLanguageModel", "get_language_model"]


def get_language_model(
    config,
    num_tokentypes=0,
    add_pooler=False,
    encoder_attn_mask_type=AttnMaskType.causal,
    add_encoder=True,
    add_decoder=False,
    decoder_attn_mask_type=None,
    pre_process=True,
    post_process=True,
):
    """Build the language model of this pipeline stage: (cell, state-dict key); arguments as `TransformerLanguageModel`."""
    model = TransformerLanguageModel(
        config,
        encoder_attn_mask_type,
        num_tokentypes=num_tokentypes,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
        decoder_attn_mask_type=decoder_attn_mask_type,
        add_pooler=add_pooler,
        pre_process=pre_process,
        post_process=post_process,
    )
    return model, "language_model"


class TransformerLanguageModel(Module):
    """Language model without head: token ids to hidden states; the last stage owns the head's weight (`output_layer`).

    Args:
        config (TransformerConfig): the model.
        encoder_attn_mask_type (AttnMaskType): what a missing mask means.
        num_tokentypes (int): rows of the token type table; 0 for none.
        add_encoder, add_decoder, decoder_attn_mask_type, add_pooler, visual_encoder: other architectures; only the
            defaults exist here.
        pre_process (bool): the stage starts the model and holds the embedding.
        post_process (bool): the stage ends the model and holds final norm and head.

    Inputs: ids `[b, s]`, position ids `[b, s]` or None, attention mask or None (see `attention_mask`), tokentype_ids
    `[b, s]`, inference_params; the other arguments must be None. Output: hidden states `[s, b, h]` (`[s / tp, b, h]` under
    sequence parallelism).

    Raises:
        ValueError: settings of a feature that is not available, another architecture, or inputs of one; sequence length
            that tensor parallelism does not divide.
    """

    def __init__(
        self,
        config,
        encoder_attn_mask_type=AttnMaskType.causal,
        num_tokentypes=0,
        add_encoder=True,
        add_decoder=False,
        decoder_attn_mask_type=AttnMaskType.causal,
        add_pooler=False,
        pre_process=True,
        post_process=True,
        visual_encoder=None,
        **kwargs,
    ):
        super().__init__(describe_config(config, num_tokentypes=num_tokentypes))
        config, described, model = self.config, self.described, self.described.model
        check_model(model)
        require_model_available(config)
        _refuse_other_architectures(add_encoder, add_decoder, add_pooler, visual_encoder, kwargs)
        self.pre_process, self.post_process = pre_process, post_process
        self.num_tokentypes = num_tokentypes
        self.encoder_hidden_state = None
        self.sequence_parallel = self.settings.sequence_parallel
        self.holds_embedding = pre_process or (post_process and bool(model.mtp_num_layers))
        if self.holds_embedding:
            self.embedding = Embedding(
                config.hidden_size,
                config.vocab_size,
                model.max_position_embeddings,
                config.hidden_dropout,
                described,
                num_tokentypes,
            )
            self._share_embedding(model)
        self.use_rope = config.position_embedding_type == "rope"
        if self.use_rope:
            self.rotary_pos_emb = RotaryEmbedding(
                model.rotary_width,
                config.rotary_percent,
                config.rotary_interleaved,
                config.rotary_seq_len_interpolation_factor,
                config.rotary_base,
                model.max_position_embeddings,
                config.rope_scaling,
            )
        self.encoder = ParallelTransformer(
            described,
            self_attn_mask_type=to_enum(AttnMaskType, encoder_attn_mask_type),
            pre_process=pre_process,
            post_process=post_process,
        )
        if post_process:
            self._create_output_layer(model)

    def _share_embedding(self, model):
        """Describe the word embeddings that multi-token prediction has on the first and on the last stage."""
        weight = self.embedding.word_embeddings.weight
        if not self.pre_process:
            set_description(weight, as_tied_copy(model, weight.description.under("embedding.word_embeddings")))
        elif model.mtp_num_layers and model.stages.pp > 1:
            set_description(weight, replace(weight.description, shared=True))

    def _create_output_layer(self, model):
        """The weight of the head: none of a reward model, its own, or on a last stage a copy of the tied one."""
        if model.gives_values or (model.is_tied and self.holds_embedding):
            return
        self.output_layer = build_linear(output_layer(model), self.described)
        if model.is_tied:
            weight = self.output_layer.weight
            set_description(weight, as_tied_copy(model, weight.description.under("output_layer")))

    def reserve_positions(self, length):
        """Allow explicit position ids below `length`, for sequences that are longer than those of the training.

        Raises:
            ValueError: the table of learned positions is shorter.
        """
        if self.use_rope:
            self.rotary_pos_emb.reserve(length)
        elif self.described.model.has_position_table and length > self.described.model.max_position_embeddings:
            raise ValueError(
                f"{length} positions are asked for, but the table of learned ones has "
                f"{self.described.model.max_position_embeddings} (max_position_embeddings)."
            )

    def set_input_tensor(self, input_tensor):
        """Set the hidden states from the previous stage: a Tensor, a list of one, or None.

        Raises:
            RuntimeError: a list of another length.
        """
        if isinstance(input_tensor, (list, tuple)):
            if len(input_tensor) != 1:
                raise RuntimeError(f"set_input_tensor takes one tensor, but got {len(input_tensor)}.")
            input_tensor = input_tensor[0]
        self.encoder.set_input_tensor(input_tensor)

    def construct(
        self,
        enc_input_ids,
        enc_position_ids=None,
        enc_attn_mask=None,
        dec_input_ids=None,
        dec_position_ids=None,
        dec_attn_mask=None,
        retriever_input_ids=None,
        retriever_position_ids=None,
        retriever_attn_mask=None,
        enc_dec_attn_mask=None,
        tokentype_ids=None,
        inference_params=None,
        pooling_sequence_index=0,
        enc_hidden_states=None,
        output_enc_hidden=False,
        input_image=None,
    ):
        """See the class."""
        others = {
            "dec_input_ids": dec_input_ids,
            "dec_position_ids": dec_position_ids,
            "dec_attn_mask": dec_attn_mask,
            "retriever_input_ids": retriever_input_ids,
            "retriever_position_ids": retriever_position_ids,
            "retriever_attn_mask": retriever_attn_mask,
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_hidden_states": enc_hidden_states,
            "input_image": input_image,
        }
        given = [name for name, value in others.items() if value is not None]
        if given or output_enc_hidden:
            raise ValueError(f"{given or ['output_enc_hidden']} belong to other architectures: leave them out.")
        length = self._sequence_length(enc_input_ids)
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1 and enc_position_ids is None:
            enc_position_ids = local_position_ids(length)
        hidden_states = None
        if self.pre_process:
            hidden_states = self.embedding(enc_input_ids, enc_position_ids, tokentype_ids)
        rotary_pos_emb = self.rotary_table(length * ranks, enc_position_ids)
        return self.encoder(hidden_states, enc_attn_mask, inference_params=inference_params, rotary_pos_emb=rotary_pos_emb)

    def rotary_table(self, length, position_ids):
        """Rotary embedding of a whole sequence; None without one."""
        return self.rotary_pos_emb.table(length, position_ids) if self.use_rope else None

    def _sequence_length(self, ids):
        """Length of this rank's part of the sequence, whole over tensor parallelism: of the ids or the input's states."""
        if ids is not None:
            if self.sequence_parallel:
                size = parallel_state.get_tensor_model_parallel_world_size()
                divide(ids.shape[1], size, "sequence_parallel: the sequence length", "tensor_model_parallel_size")
            return ids.shape[1]
        if self.encoder.input_tensor is None:
            raise ValueError("this pipeline stage has no input: call set_input_tensor() before the model.")
        length = self.encoder.input_tensor.shape[0]
        return length * parallel_state.get_tensor_model_parallel_world_size() if self.sequence_parallel else length


def _refuse_other_architectures(add_encoder, add_decoder, add_pooler, visual_encoder, kwargs):
    refused = {
        "add_encoder=False": not add_encoder,
        "add_decoder=True": add_decoder,
        "add_pooler=True": add_pooler,
        "visual_encoder": visual_encoder is not None,
    }
    given = [name for name, is_given in refused.items() if is_given] + sorted(kwargs)
    if given:
        raise ValueError(f"TransformerLanguageModel is a dense decoder-only model, which has no {', '.join(given)}.")
