"""Router of a mixture of experts: logits, choice of experts, balance losses. Source: Megatron core, `router.py`."""

from contextlib import nullcontext

import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.autograd import no_grad
from mindspeed_ms.core.expert_parallel.balance import balance_loss, balance_scores, z_loss
from mindspeed_ms.core.expert_parallel.routing import route
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import attach_auxiliary_loss, record_auxiliary, records_auxiliary
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.layout.describers.mlp import router_of
from mindspeed_ms.legacy.model.module import Module

AUX_LOSS, Z_LOSS = "load_balancing_loss", "z_loss"
DROPPED_TOKENS = "moe/dropped_tokens"
TOKENS_OF_EXPERT = "moe/tokens_of_expert"


class _Gating(ParallelCell):
    """The router's weight `[experts, h]`, and its bias `[experts]` or None."""

    names_are_global = False

    def __init__(self, descriptions):
        super().__init__()
        self.bias = None
        self.create_parameters(descriptions)


class TopKRouter(Module):
    """Router: sends each token to `moe_router_topk` experts.

    Args:
        config (TransformerConfig): the model; read: `moe_config`.

    Inputs: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism). Output: `Routing` of the tokens in
    this order; in training its probabilities carry the auxiliary losses.

    Attributes:
        layer_number (Optional[int]): global number of the layer, from 1, for the names of its metrics.
        tokens_of_experts (ndarray): tokens for each expert since the last update of `expert_bias`, float64 `[experts]`.
    """

    names_are_global = False

    def __init__(self, config):
        super().__init__(config)
        model = self.described.model
        self.moe = self.config.moe_config
        self.experts = model.num_experts
        router = router_of(model)
        part = self.settings.part()
        self.gating = _Gating(router.describe_gating(part))
        self.expert_bias = None
        self.create_parameters(router.describe_bias())
        self.per_token = model.calculate_per_token_loss
        self.layer_number = None
        self.tokens_of_experts = np.zeros(model.num_experts)

    def construct(self, hidden_states):
        """See the class."""
        sequences = hidden_states.shape[1]
        tokens = hidden_states.reshape((-1, hidden_states.shape[-1]))
        logits = self._with_z_loss(self.logits(self._with_jitter(tokens)))
        routing = route(logits, self.moe, self.expert_bias, self.training)
        if self.training:
            routing = self._with_balance_loss(routing, logits, sequences)
            self._count(routing)
        return routing

    def logits(self, tokens):
        """Logits float32 `[t, experts]` of tokens `[t, h]`; the product is computed in `moe_router_dtype`."""
        weight, bias, kind = self.gating.weight, self.gating.bias, self.moe.moe_router_dtype
        if kind == "fp64":
            logits = ops.linear_summed_in_double(tokens, weight)
            return logits if bias is None else ops.add_bias(logits, cast(bias, logits.dtype))
        dtype = "float32" if kind == "fp32" else tokens.dtype
        return ops.cast(ops.linear(cast(tokens, dtype), cast(weight, dtype), cast(bias, dtype)), "float32")

    def _with_jitter(self, tokens):
        if self.moe.moe_input_jitter_eps is None or not self.training:
            return tokens
        eps = self.moe.moe_input_jitter_eps
        with get_rng_tracker().fork() if self.settings.sequence_parallel else nullcontext():
            noise = get_rng_tracker().current.uniform(tuple(tokens.shape)) * (2.0 * eps) + (1.0 - eps)
        return tokens * cast(noise, tokens.dtype)

    def _attach(self, activation, loss):
        """`activation` with an auxiliary loss, this rank's part of a sum over the ranks that share the sequences."""
        if self.per_token:  # gradients are divided by the tokens of the batch later
            group = parallel_state.get_tensor_and_context_parallel_group()
            loss = loss * float(activation.shape[0] * group.size)
        return attach_auxiliary_loss(activation, loss)

    def _with_z_loss(self, logits):
        coefficient = self.moe.moe_z_loss_coeff
        if not coefficient or not self.training:
            return logits
        loss = z_loss(logits)
        with no_grad():
            group = parallel_state.get_tensor_and_context_parallel_group()
            self._record(Z_LOSS, group.all_reduce(loss.reshape((1,))).reshape(()))
        return self._attach(logits, loss * coefficient)

    def _with_balance_loss(self, routing, logits, sequences):
        kind, coefficient = self.moe.moe_router_load_balancing_type, self.moe.moe_aux_loss_coeff
        if kind not in ("aux_loss", "seq_aux_loss") or not coefficient:
            return routing
        scores = balance_scores(logits, self.moe.moe_router_score_function, self.moe.moe_router_topk)
        by_sequence = kind == "seq_aux_loss"
        loss, whole = balance_loss(
            scores,
            routing.kept if by_sequence else routing.chosen,
            self.moe.moe_router_topk,
            coefficient,
            sequences if by_sequence else None,
        )
        self._record(AUX_LOSS, whole)
        return routing.with_probs(self._attach(routing.probs, loss))

    def _record(self, name, value):
        record_auxiliary(name, value)
        if self.moe.moe_per_layer_logging and self.layer_number is not None:
            record_auxiliary(f"moe/{name}_layer_{self.layer_number - 1}", value)

    @no_grad()
    def _count(self, routing):
        """Count tokens for the expert bias and for the metrics, once per forward."""
        limited = self.moe.moe_expert_capacity_factor is not None
        if not records_auxiliary() or not (self.expert_bias is not None or limited or self.moe.moe_per_layer_logging):
            return
        kept = ops.bias_grad(routing.kept)
        if self.expert_bias is not None:
            self.tokens_of_experts = self.tokens_of_experts + kept.asnumpy()
        group = parallel_state.get_tensor_and_context_parallel_group()
        if limited:
            dropped = ops.total(ops.bias_grad(routing.chosen) - kept).reshape((1,))
            record_auxiliary(DROPPED_TOKENS, group.all_reduce(dropped).reshape(()))
        if self.moe.moe_per_layer_logging:
            for expert, count in enumerate(group.all_reduce(kept).asnumpy()):
                record_auxiliary(f"{TOKENS_OF_EXPERT}_{expert}", float(count))
