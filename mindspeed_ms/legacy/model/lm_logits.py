"""The head. Source: Megatron's `parallel_lm_logits`."""

from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.cell import create_parameter
from mindspeed_ms.core.tensor_parallel.layers import parallel_config_of
from mindspeed_ms.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from mindspeed_ms.layout.options import uses_sequence_parallel
from mindspeed_ms.layout.sharding import Initializer, ParameterSharding
from mindspeed_ms.legacy.model.module import Module


class ParallelLMLogits(Module):
    """Logits of hidden states, by a weight that comes with each call (tied or not).

    Args:
        config (TransformerConfig): vocabulary, sequence parallelism, dtypes.
        bias (bool): the head has a bias `[v / tp]`.
        compute_dtype: dtype of the product; default config's.

    Inputs: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism), weight `[v / tp, h]`,
    `parallel_output` True, `bias` instead of an own one. Output: `[s, b, v / tp]`, or `[s, b, v]` on every rank without
    `parallel_output`.
    """

    names_are_global = False

    def __init__(self, config, bias=False, compute_dtype=None):
        super().__init__(config)
        self.compute_dtype = to_dtype(compute_dtype or config.compute_dtype)
        self.sequence_parallel = uses_sequence_parallel(config)
        self.fuse_accumulation = bool(getattr(parallel_config_of(config), "gradient_accumulation_fusion", False))
        self.bias = None
        if bias:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            self.bias = create_parameter(
                ParameterSharding.contiguous((config.vocab_size,), 0, rank, size),
                config.params_dtype,
                Initializer.zeros(),
                tensor_model_parallel=True,
                grouping="vocab",
            )

    def construct(self, input_, word_embedding_table, parallel_output=True, bias=None):
        """See the class."""
        logits = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            word_embedding_table,
            self.bias if bias is None else bias,
            self.fuse_accumulation,
            not self.sequence_parallel,
            self.sequence_parallel,
            compute_dtype=self.compute_dtype,
        )
        return logits if parallel_output else gather_from_tensor_model_parallel_region(logits)
