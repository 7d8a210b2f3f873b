"""Embedding, layers and head weight of a language model. Source: Megatron's legacy `language_model.py`."""

from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.layout.gpt_sizes import read_sizes
from mindspeed_ms.layout.options import uses_sequence_parallel
from mindspeed_ms.legacy.model.embedding import Embedding
from mindspeed_ms.legacy.model.enums import AttnMaskType, to_enum
from mindspeed_ms.legacy.model.initializers import model_initializers
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
    """The language model of this pipeline stage and its state-dict key; arguments as `TransformerLanguageModel`."""
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
    """Token ids to hidden states; on the last stage also the owner of the head's weight (`output_layer`).

    Args:
        config (TransformerConfig): the model.
        encoder_attn_mask_type (AttnMaskType): what a missing mask means.
        num_tokentypes (int): rows of the token type table; 0 for none.
        add_encoder, add_decoder, decoder_attn_mask_type, add_pooler, visual_encoder: other architectures; only the
            defaults exist here.
        pre_process (bool): the stage starts the model and holds the embedding.
        post_process (bool): the stage ends the model and holds final norm and head.

    Inputs: ids `[b, s]`, position ids `[b, s]` or None, attention mask or None (see `attention_mask`), tokentype_ids
    `[b, s]`; the other arguments must be None. Output: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence
    parallelism).

    Raises:
        ValueError: another architecture, or inputs of one; sequence length that tensor parallelism does not divide.
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
        super().__init__(config)
        read_sizes(config)  # every size divides, every kind is known
        _refuse_other_architectures(config, add_encoder, add_decoder, add_pooler, visual_encoder, kwargs)
        self.pre_process, self.post_process = pre_process, post_process
        self.num_tokentypes = num_tokentypes
        self.encoder_hidden_state = None
        self.sequence_parallel = uses_sequence_parallel(config)
        if pre_process:
            self.embedding = Embedding(
                config.hidden_size,
                config.vocab_size,
                getattr(config, "max_position_embeddings", None) or config.seq_length,
                config.hidden_dropout,
                config,
                num_tokentypes,
            )
        self.use_rope = config.position_embedding_type == "rope"
        if self.use_rope:
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                config.rotary_percent,
                config.rotary_interleaved,
                config.rotary_seq_len_interpolation_factor,
                config.rotary_base,
                getattr(config, "max_position_embeddings", None) or config.seq_length,
            )
        self.encoder = ParallelTransformer(
            config,
            self_attn_mask_type=to_enum(AttnMaskType, encoder_attn_mask_type),
            pre_process=pre_process,
            post_process=post_process,
        )
        if post_process:
            self._create_output_layer(config)

    def _create_output_layer(self, config):
        """The head's weight: its own, or on a last stage without the embedding a copy of the tied one."""
        untied = config.untie_embeddings_and_output_weights
        if not untied and self.pre_process:
            return
        initial = model_initializers(config)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            config=config,
            init_method=initial.block if untied else initial.embedding,
            bias=False,
            grouping="vocab",
        )
        if not untied:
            weight = self.output_layer.weight
            weight.shared_with = ("output_layer.weight", "embedding.word_embeddings.weight")
            weight.draw_dtype = getattr(config, "embedding_init_dtype", None)

    def set_input_tensor(self, input_tensor):
        """Hidden states from the stage before: a Tensor, a list of one, or None.

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
            "inference_params": inference_params,
            "enc_hidden_states": enc_hidden_states,
            "input_image": input_image,
        }
        given = [name for name, value in others.items() if value is not None]
        if given or output_enc_hidden:
            raise ValueError(f"{given or ['output_enc_hidden']} belong to other architectures: leave them out.")
        length = self._sequence_length(enc_input_ids)
        hidden_states = None
        if self.pre_process:
            hidden_states = self.embedding(enc_input_ids, enc_position_ids, tokentype_ids)
        rotary_pos_emb = None
        if self.use_rope:
            rotary_pos_emb = self.rotary_pos_emb.table(length, enc_position_ids)
        return self.encoder(hidden_states, enc_attn_mask, rotary_pos_emb=rotary_pos_emb)

    def _sequence_length(self, ids):
        """Whole length of this rank's sequence; from the hidden states where a stage gets no ids."""
        if ids is not None:
            if self.sequence_parallel:
                size = parallel_state.get_tensor_model_parallel_world_size()
                divide(ids.shape[1], size, "sequence_parallel: the sequence length", "tensor_model_parallel_size")
            return ids.shape[1]
        if self.encoder.input_tensor is None:
            raise ValueError("this pipeline stage has no input: call set_input_tensor() before the model.")
        length = self.encoder.input_tensor.shape[0]
        return length * parallel_state.get_tensor_model_parallel_world_size() if self.sequence_parallel else length


def _refuse_other_architectures(config, add_encoder, add_decoder, add_pooler, visual_encoder, kwargs):
    refused = {
        "add_encoder=False": not add_encoder,
        "add_decoder=True": add_decoder,
        "add_pooler=True": add_pooler,
        "visual_encoder": visual_encoder is not None,
        "qk_layernorm": getattr(config, "qk_layernorm", False),
        "multi_latent_attention": getattr(config, "multi_latent_attention", False),
        "apply_layernorm_1p": getattr(config, "apply_layernorm_1p", False),
        "rope_scaling": getattr(config, "rope_scaling", None) is not None,
        "retro_add_retriever": getattr(config, "retro_add_retriever", False),
        "fp8_format": getattr(config, "fp8_format", None) is not None,
        "num_experts above 1": (getattr(getattr(config, "moe_config", None), "num_experts", None) or 1) > 1,
    }
    given = [name for name, is_given in refused.items() if is_given] + sorted(kwargs)
    if given:
        raise ValueError(f"TransformerLanguageModel is a dense decoder-only model, which has no {', '.join(given)}.")
