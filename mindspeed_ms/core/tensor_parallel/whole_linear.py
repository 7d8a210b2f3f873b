"""WholeLinearLayer: a linear layer that every tensor-parallel rank holds whole, such as a projection to compressed keys."""

from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell
from mindspeed_ms.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.settings import LayerSettings


class WholeLinearLayer(ParallelCell):
    """Linear layer `x A^T + b` with whole parameters on every rank and without communication.

    Under sequence parallelism a rank sees its part of the sequence: gradients of the parameters are partial sums, which
    `finalize_model_grads` adds. Without it every rank computes the same.

    Args:
        linear (WholeLinear): sizes, initializers.
        config: TransformerConfig, DescribedConfig or ModelParallelConfig (sequence_parallel, dtypes).

    Input: `[..., in]`. Output: `[..., out]`.
    """

    names_are_global = False

    def __init__(self, linear, config):
        super().__init__()
        settings = LayerSettings.of(describe_config(config))
        self.compute_dtype = to_dtype(settings.compute_dtype or settings.params_dtype)
        self.fuse_accumulation = settings.gradient_accumulation_fusion
        self.bias = None
        self.create_parameters(linear.describe(settings.part()))

    def construct(self, input_):
        """See the class."""
        return linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            self.bias,
            self.fuse_accumulation,
            False,
            False,
            compute_dtype=self.compute_dtype,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
