"""GPTModel: language model, head and loss. Source: Megatron's legacy `gpt_model.py` and upstream's guide."""

import numpy as np
from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel import VisibleKeys, get_batch_on_this_cp_rank
from mindspeed_ms.core.tensor_parallel.chunked import chunked_cross_entropy
from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from mindspeed_ms.core.tensor_parallel.lora import add_adapters
from mindspeed_ms.legacy.model.counted_tokens import counted_tokens
from mindspeed_ms.legacy.model.enums import AttnMaskType
from mindspeed_ms.legacy.model.eos_mask import EosMask
from mindspeed_ms.legacy.model.language_model import get_language_model
from mindspeed_ms.legacy.model.lm_logits import ParallelLMLogits
from mindspeed_ms.legacy.model.loss_func import LossWithMask
from mindspeed_ms.legacy.model.mcore_keywords import KEYWORDS, check_keywords
from mindspeed_ms.legacy.model.model_inputs import check_inputs
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.multi_token_prediction import MultiTokenPrediction
from mindspeed_ms.legacy.model.reward_head import RewardHead


def post_language_model_processing(
    parallel_lm_logits, loss_fn, lm_output, labels, logit_weights, parallel_output, fp16_lm_cross_entropy, loss_mask
):
    """Logits of the hidden states; with labels the loss.

    Args:
        parallel_lm_logits (Cell): hidden states and weight to `[s, b, v / tp]`.
        loss_fn (Cell): logits `[b, s, v / tp]`, labels `[b, s]`, mask `[b, s]` to a scalar.
        lm_output (Tensor): hidden states `[s, b, h]`.
        labels (Optional[Tensor]): ids `[b, s]`; None returns the logits.
        logit_weights (Tensor): `[v / tp, h]`.
        parallel_output (bool): leave the logits cut over the vocabulary. The loss always takes them cut.
        fp16_lm_cross_entropy (bool): take the loss of float16 logits instead of float32 ones.
        loss_mask (Tensor): weight of each token `[b, s]`.

    Returns:
        Tensor: logits `[b, s, v / tp]` (`[b, s, v]` without `parallel_output`), or the loss.

    Raises:
        ValueError: `fp16_lm_cross_entropy` and logits of another dtype.
    """
    if labels is None:
        return mint.transpose(parallel_lm_logits(lm_output, logit_weights, parallel_output), 0, 1).contiguous()
    logits = parallel_lm_logits(lm_output, logit_weights, True)
    if not fp16_lm_cross_entropy:
        logits = ops.cast(logits, dtype.float32)
    elif logits.dtype != dtype.float16:
        raise ValueError(
            f"fp16_lm_cross_entropy needs float16 logits, but they are {logits.dtype}: set compute_dtype to float16."
        )
    if not isinstance(loss_fn, LossWithMask):
        return loss_fn(mint.transpose(logits, 0, 1).contiguous(), labels, loss_mask)
    # Order does not matter to it: labels and mask are turned instead of the logits, thousands of times larger.
    loss_mask = None if loss_mask is None else mint.transpose(loss_mask, 0, 1).contiguous()
    return loss_fn(logits, mint.transpose(labels, 0, 1).contiguous(), loss_mask)


class GPTModel(Module):
    """Decoder-only language model, or one pipeline stage of it.

    Args:
        config (TransformerConfig): the model.
        num_tokentypes (int): rows of the token type table.
        parallel_output (bool): leave logits cut over the vocabulary.
        pre_process, post_process (bool): the stage starts, ends the model.
        eod (Optional[int]): id that ends a document; position ids and mask are derived from it when one is missing.
        reset_position_ids (bool): with `eod`, count positions from 0 in each document.
        keywords of Megatron core's GPTModel (vocab_size, rotary_percent, mtp_block_spec, ...): must say what the
            configuration says, see `mcore_keywords`.

    Inputs: tokens `[b, s]`, position_ids `[b, s]` or None, attention_mask (see `attention_mask`) or None for causal,
    loss_mask `[b, s]` (None counts every token), labels `[b, s]` or None, tokentype_ids,
    inference_params (see `inference.inference_params`) or None, actual_seq_len `[b, n]` instead of a mask: lengths of the
    documents packed in each sample (zeros do not count), which do not see each other. The retriever's arguments must be None.

    Under context parallelism the inputs `[b, s]` are whole sequences or this rank's part of them (see `cut_batch`), the mask is
    that of whole sequences or its rows of this part; logits and hidden states are this part's.

    Output: the loss (scalar, mean over the tokens that the mask counts); without labels the logits
    `[b, s, v / tp]`, with inference_params what these read out; on other stages than the last the hidden states `[s, b, h]`.
    A reward model (architecture "gpt_reward", as of stage orm) gives the value of each token, float32 `[b, s]`. A policy with a
    critic ("gpt_policy", stage trl_ppo) whose `loss` gives those of the tokens gives them and the values, float32 `[2b, s]`.

    Raises:
        ValueError: sizes that the parallel sizes do not divide, unknown arguments; in a call, ids or labels outside the
            vocabulary, inputs of another kind or shape (see `check_inputs`).
    """

    def __init__(self, config, num_tokentypes=0, parallel_output=True, pre_process=True, post_process=True, **kwargs):
        if not isinstance(num_tokentypes, int):
            raise ValueError(
                f"GPTModel: num_tokentypes is {num_tokentypes!r}, expected an integer; give the arguments of Megatron core's "
                "GPTModel (transformer_layer_spec, vocab_size, ...) by name."
            )
        described = describe_config(config, num_tokentypes=num_tokentypes)
        super().__init__(described, described.model.is_tied)
        config = self.config
        unknown = sorted(set(kwargs) - {"eod", "reset_position_ids", *KEYWORDS})
        if unknown:
            known = ", ".join(("eod", "reset_position_ids", *KEYWORDS))
            raise ValueError(f"GPTModel does not know {', '.join(unknown)}: expected some of {known}.")
        check_keywords(config, {name: value for name, value in kwargs.items() if name in KEYWORDS})
        self.parallel_output = parallel_output
        self.pre_process, self.post_process = pre_process, post_process
        self.untie_embeddings_and_output_weights = not described.model.is_tied
        self.fp16_lm_cross_entropy = config.fp16_lm_cross_entropy
        self.seq_length = config.seq_length
        self.loss_chunk_size = config.loss_chunk_size
        self.eod = kwargs.get("eod")
        self.eod_mask = None
        if self.eod is not None:
            batch_size = config.dataset_config.batch_size
            self.eod_mask = EosMask(batch_size, config.seq_length, self.eod, kwargs.get("reset_position_ids", False))
        self.language_model, _ = get_language_model(
            described,
            num_tokentypes=num_tokentypes,
            add_pooler=False,
            encoder_attn_mask_type=AttnMaskType.causal,
            pre_process=pre_process,
            post_process=post_process,
        )
        self.gives_values = described.model.gives_values
        self.has_critic = described.model.has_critic
        if post_process and (self.gives_values or self.has_critic):
            self.reward_head = RewardHead(described)
        if post_process and not self.gives_values:
            self.parallel_lm_logits = ParallelLMLogits(described, bias=False, compute_dtype=config.compute_dtype)
            cross_entropy = VocabParallelCrossEntropy(overwrite_logits=True)
            self.loss = LossWithMask(cross_entropy, label_smoothing=config.label_smoothing)
        # with adapters the head is frozen; under sequence parallelism its input is cut
        is_cut = self.settings.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1
        self._counts_tokens = bool(described.model.adapters) and not is_cut
        self.mtp = MultiTokenPrediction(described) if post_process and described.model.mtp_num_layers else None
        if not self.untie_embeddings_and_output_weights:
            self.initialize_word_embeddings()
        add_adapters(described.model, self)

    def set_input_tensor(self, input_tensor):
        """Set the hidden states from the previous pipeline stage."""
        self.language_model.set_input_tensor(input_tensor)

    def cut_batch(self, batch):
        """Batch (dict) cut to this rank's part of the sequences, unless it is one already; see `get_batch_on_this_cp_rank`."""
        varies = self.described.model.parallel.variable_seq_lengths
        return get_batch_on_this_cp_rank(batch, None if varies else self.seq_length)

    def _loss_in_chunks(self, lm_output, labels, logit_weights, loss_mask):
        """The loss without the logits of all tokens at once."""
        labels = mint.transpose(labels, 0, 1).contiguous()
        loss_mask = None if loss_mask is None else mint.transpose(loss_mask, 0, 1).contiguous()
        loss = chunked_cross_entropy(
            lm_output,
            logit_weights,
            labels,
            self.loss_chunk_size,
            parallel_state.get_tensor_model_parallel_group(),
            self.settings,
            self.parallel_lm_logits.compute_dtype,
            self.loss.label_smoothing,
        )
        return self.loss.mean(loss, labels, loss_mask)

    def _on_this_rank(self, **inputs):
        return self.cut_batch(inputs).values()

    def _documents(self, lengths, attention_mask, tokens):
        """Mask of packed documents of these lengths."""
        if attention_mask is not None:
            raise ValueError("attention_mask and actual_seq_len are both given: leave one out.")
        (tokens,) = self._on_this_rank(tokens=tokens)
        length = tokens.shape[1] * parallel_state.get_context_parallel_world_size()
        lengths = np.asarray(lengths.asnumpy() if hasattr(lengths, "asnumpy") else lengths)
        if lengths.ndim != 2 or len(lengths) not in (1, tokens.shape[0]) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"actual_seq_len of shape {lengths.shape} and {lengths.dtype} does not fit {tokens.shape[0]} samples: expected "
                "integers [b, n], the lengths of the documents of each sample."
            )
        return VisibleKeys.of_documents(lengths, length)

    def construct(
        self,
        tokens,
        position_ids=None,
        attention_mask=None,
        loss_mask=None,
        retriever_input_ids=None,
        retriever_position_ids=None,
        retriever_attn_mask=None,
        labels=None,
        tokentype_ids=None,
        inference_params=None,
        actual_seq_len=None,
    ):
        """See the class."""
        if actual_seq_len is not None:
            attention_mask = self._documents(actual_seq_len, attention_mask, tokens)
        tokens, position_ids, loss_mask, labels, tokentype_ids = self._on_this_rank(
            tokens=tokens, position_ids=position_ids, loss_mask=loss_mask, labels=labels, tokentype_ids=tokentype_ids
        )
        check_inputs(self.config, tokens, position_ids, loss_mask, labels if self.post_process else None)
        if self.eod_mask is not None and (position_ids is None or attention_mask is None):
            position_ids, attention_mask = self.eod_mask(tokens)
        lm_output = self.language_model(
            tokens,
            position_ids,
            attention_mask,
            tokentype_ids=tokentype_ids,
            retriever_input_ids=retriever_input_ids,
            retriever_position_ids=retriever_position_ids,
            retriever_attn_mask=retriever_attn_mask,
            inference_params=inference_params,
        )
        if not self.post_process:
            return lm_output
        if self.gives_values:
            return self.reward_head(lm_output)
        if self.untie_embeddings_and_output_weights:
            logit_weights = self.language_model.output_layer.weight
        else:
            logit_weights = self.shared_embedding_or_output_weight()
        if inference_params is not None:
            return inference_params.read_out(lm_output, lambda hidden: self.parallel_lm_logits(hidden, logit_weights, True))
        if self.mtp is not None and labels is not None and self.training:
            lm_output = self.mtp(
                self.language_model,
                lambda hidden, ids, mask: self._loss_or_logits(hidden, ids, logit_weights, mask),
                lm_output,
                tokens,
                position_ids,
                attention_mask,
                tokentype_ids,
                labels,
                loss_mask,
            )
        read_out = self._loss_or_logits(lm_output, labels, logit_weights, loss_mask)
        if labels is not None and self.has_critic:
            return ops.cat([read_out, self.reward_head(lm_output)])
        return read_out

    def _loss_or_logits(self, lm_output, labels, logit_weights, loss_mask):
        """Logits of the final hidden states; with labels the loss."""
        if self._counts_tokens and labels is not None and loss_mask is not None and type(self.loss) is LossWithMask:
            lm_output, labels, loss_mask = counted_tokens(lm_output, labels, loss_mask, bool(self.loss_chunk_size))
        if labels is not None and self.loss_chunk_size:
            return self._loss_in_chunks(lm_output, labels, logit_weights, loss_mask)
        return post_language_model_processing(
            self.parallel_lm_logits,
            self.loss,
            lm_output,
            labels,
            logit_weights,
            self.parallel_output,
            self.fp16_lm_cross_entropy,
            loss_mask,
        )
