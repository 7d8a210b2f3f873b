"""ParallelLMLogits: output head, logits of the vocabulary. Source: Megatron's `parallel_lm_logits`."""

from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from mindspeed_ms.layout.layer_parameters import Linear
from mindspeed_ms.layout.sharding import Initializer
from mindspeed_ms.legacy.model.module import Module


class ParallelLMLogits(Module):
    """Output head: logits of hidden states by a weight that is passed with each call (tied or not).

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
        settings = self.settings
        self.compute_dtype = to_dtype(compute_dtype or settings.compute_dtype)
        self.sequence_parallel = settings.sequence_parallel
        self.fuse_accumulation = settings.gradient_accumulation_fusion
        self.bias = None
        if bias:
            zeros = Initializer.zeros()
            sizes = {"input_size": self.config.hidden_size, "output_size": self.config.vocab_size}
            head = Linear(column=True, **sizes, initializer=zeros, bias=zeros, has_weight=False, grouping="vocab")
            self.create_parameters(head.describe(settings.part()))

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
