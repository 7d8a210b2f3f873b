"""RewardHead: one value per token, the head of a reward model (and of a critic) instead of the vocabulary's."""

from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from mindspeed_ms.layout.describers.gpt import reward_head
from mindspeed_ms.legacy.model.module import Module


class RewardHead(Module):
    """Linear `[h]` to a scalar, whole on every tensor-parallel rank, computed in float32.

    Args:
        config (DescribedConfig): the model.

    Inputs: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism). Output: values float32 `[b, s]`, equal on
    the tensor-parallel ranks.
    """

    names_are_global = False

    def __init__(self, config):
        super().__init__(config)
        self.sequence_parallel = self.settings.sequence_parallel
        self.create_parameters(reward_head(self.described.model, self.settings.part()))

    def construct(self, hidden_states):
        """See the class."""
        values = linear_with_grad_accumulation_and_async_allreduce(
            ops.cast(hidden_states, dtype.float32), self.weight, None, False, False, False, compute_dtype="float32"
        )
        if self.sequence_parallel:
            # every rank computes the same loss of all values: each takes the gradient of its own ones
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return mint.transpose(values.reshape(tuple(values.shape[:2])), 0, 1).contiguous()
