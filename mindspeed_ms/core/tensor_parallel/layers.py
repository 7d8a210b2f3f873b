"""Tensor-parallel layers: ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding. Source: Megatron, `layers.py`."""

from mindspore import mint
from mindspore.common.initializer import Zero

from mindspeed_ms import ops
from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.device import dtype_name, to_dtype
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell
from mindspeed_ms.core.tensor_parallel.initialization import to_initializer
from mindspeed_ms.core.tensor_parallel.linear import cast, linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mindspeed_ms.core.tensor_parallel.settings import LayerSettings
from mindspeed_ms.core.tensor_parallel.utils import VocabUtility, check_integer, divide
from mindspeed_ms.layout.layer_parameters import EmbeddingTable, LayerPart, Linear

_ZERO = Zero()


class _ParallelLinear(ParallelCell):
    """Base of column- and row-parallel linears: checks, group, dtypes, parameters."""

    names_are_global = False
    is_column = True

    def __init__(
        self, input_size, output_size, config, is_expert, stride, tp_comm_buffer_name, param_init_dtype, compute_dtype
    ):
        super().__init__()
        described = describe_config(config)
        self.config = described.config
        self.input_size, self.output_size = input_size, output_size
        self.is_expert = is_expert
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"{self._label}: stride must be a positive integer, but got {stride!r}.")
        self.stride = stride
        if tp_comm_buffer_name is not None:
            raise ValueError(
                f"{self._label}: tp_comm_buffer_name {tp_comm_buffer_name!r} names a buffer of Transformer Engine, "
                "which is not used here: leave it None."
            )
        self.settings = settings = LayerSettings.of(described)
        kind = "expert-tp" if is_expert else "tp"
        self.world_size = parallel_state.group_size(kind)
        self.rank = parallel_state.group_rank(kind)
        self.sequence_parallel = settings.sequence_parallel
        expert_parallel_size = parallel_state.get_expert_model_parallel_world_size()
        # The token dispatcher of an expert layer communicates for it.
        self.explicit_expert_comm = is_expert and (self.world_size > 1 or expert_parallel_size > 1)
        self.param_dtype = to_dtype(param_init_dtype or settings.params_dtype)
        self.compute_dtype = to_dtype(compute_dtype or settings.compute_dtype or self.param_dtype)
        self.fuse_accumulation = settings.gradient_accumulation_fusion
        size, cut = (output_size, "output_size") if self.is_column else (input_size, "input_size")
        parts = "stride x tensor_model_parallel_size" if stride > 1 else "tensor_model_parallel_size"
        divide(size, stride * self.world_size, f"{self._label}: {cut}", parts)
        self.size_per_partition = size // self.world_size
        self.weight = self.bias = None

    @property
    def _label(self):
        return type(self).__name__

    @property
    def group(self):
        """Process group over which the layer is cut."""
        return parallel_state.get_group("expert-tp" if self.is_expert else "tp")

    @property
    def master_weight(self):
        """Whole initial weight, kept with `keep_master_weight_for_test`; else None."""
        return getattr(self.weight, "master_weight", None)

    def _create_parameters(self, init_method, bias_init, has_weight, keep_master_weight, grouping=None):
        """`weight` (with `has_weight`) and `bias` (None without `bias_init`)."""
        linear = Linear(
            column=self.is_column,
            input_size=self.input_size,
            output_size=self.output_size,
            initializer=to_initializer(init_method, self.settings.init_method_std),
            bias=None if bias_init is None else to_initializer(bias_init),
            has_weight=has_weight,
            stride=self.stride,
            grouping=grouping,
            expert=self.is_expert,
            transpose_b=self.transpose_b,
        )
        # of an expert's bias each rank of the expert-tensor group may hold a part of the gradient
        partial = self.world_size > 1 if self.is_expert else self.sequence_parallel
        part = LayerPart(self.rank, self.world_size, dtype_name(self.param_dtype), partial)
        self.create_parameters(linear.describe(part))
        if has_weight:
            self.weight.keep_master_weight = keep_master_weight

    def _matmul(self, input_, weight, bias, allreduce_dgrad, sequence_parallel):
        if not self.transpose_b:
            weight = mint.transpose(weight, 0, 1).contiguous()
        return linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            bias,
            self.fuse_accumulation,
            allreduce_dgrad,
            sequence_parallel,
            compute_dtype=self.compute_dtype,
            group=self.group,
        )


class ColumnParallelLinear(_ParallelLinear):
    """Column-parallel linear layer `x A^T + b`: output features are cut over the tensor-parallel group.

    Args:
        input_size, output_size (int): features of the whole layer.
        config: TransformerConfig or ModelParallelConfig (sequence_parallel, gradient_accumulation_fusion, dtypes).
        init_method: how the weight starts, see `initialization.to_initializer`.
        bias (bool): the layer has a bias.
        gather_output (bool): give every rank the whole output.
        stride (int): the output is `stride` equal blocks, each cut over the ranks; 2 for `[gate; up]`.
        keep_master_weight_for_test (bool): keep the whole initial weight as `master_weight`.
        skip_bias_add (bool): return the bias instead of adding it, for fusion with the next operator.
        skip_weight_param_allocation (bool): own no weight; it comes with each call (tied embeddings).
        embedding_activation_buffer, grad_output_buffer: must be None; the weight gradient is never deferred here.
        is_expert (bool): cut over the expert-tensor-parallel group; tokens arrive through the dispatcher.
        tp_comm_buffer_name: must be None; a buffer of Transformer Engine.
        disable_grad_reduce (bool): leave the input gradient as this rank's partial sum; the caller reduces it.
        bias_init: how the bias starts.
        param_init_dtype, compute_dtype: dtypes of parameters and product; default config's.
        transpose_b (bool): the weight is stored `[out, in]`; False stores `[in, out]`.
        grouping (Optional[str]): what the rows mean, kept on the weight ("qkv", "gate_up", "vocab").

    Inputs: `input_ [..., in]` (`[s / tp, b, in]` under sequence parallelism), `weight` only with
    skip_weight_param_allocation. Outputs: `[..., out / tp]` (or `[..., out]`), and the bias or None.

    Raises:
        ValueError: sizes that do not divide, arguments that cannot take effect, a weight given or missing in a call.
    """

    def __init__(
        self,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias=True,
        gather_output=False,
        stride=1,
        keep_master_weight_for_test=False,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
        embedding_activation_buffer=None,
        grad_output_buffer=None,
        is_expert=False,
        tp_comm_buffer_name=None,
        disable_grad_reduce=False,
        bias_init=_ZERO,
        param_init_dtype=None,
        compute_dtype=None,
        transpose_b=True,
        grouping=None,
    ):
        super().__init__(
            input_size, output_size, config, is_expert, stride, tp_comm_buffer_name, param_init_dtype, compute_dtype
        )
        self.transpose_b = transpose_b
        for name, value in (
            ("embedding_activation_buffer", embedding_activation_buffer),
            ("grad_output_buffer", grad_output_buffer),
        ):
            if value is not None:
                raise ValueError(
                    f"ColumnParallelLinear: {name} defers the weight gradient to the pipeline flush, but here it is "
                    "always taken in the backward itself: leave it None."
                )
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.allreduce_dgrad = self.world_size > 1 and not self.sequence_parallel and not disable_grad_reduce
        self.disable_grad_reduce = disable_grad_reduce
        self.output_size_per_partition = self.size_per_partition
        if gather_output and self.sequence_parallel and not self.explicit_expert_comm:
            raise ValueError("ColumnParallelLinear: gather_output cannot be combined with sequence_parallel.")
        if skip_weight_param_allocation and keep_master_weight_for_test:
            raise ValueError(
                "ColumnParallelLinear: keep_master_weight_for_test needs a weight of its own, but "
                "skip_weight_param_allocation is True."
            )
        has_weight = not skip_weight_param_allocation
        self._create_parameters(init_method, bias_init if bias else None, has_weight, keep_master_weight_for_test, grouping)

    def construct(self, input_, weight=None):
        """See the class."""
        weight = self._checked_weight(weight)
        bias = None if self.skip_bias_add else self.bias
        output = self._matmul(
            input_,
            weight,
            bias,
            self.allreduce_dgrad and not self.explicit_expert_comm,
            self.sequence_parallel and not self.explicit_expert_comm,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.group)
        return output, self.bias if self.skip_bias_add else None

    def _checked_weight(self, weight):
        own = self.weight
        if weight is None:
            if own is None:
                raise ValueError("ColumnParallelLinear has no own weight (skip_weight_param_allocation): pass one.")
            return own
        if own is not None:
            raise ValueError("ColumnParallelLinear has its own weight: pass none, or set skip_weight_param_allocation.")
        shape = (self.output_size_per_partition, self.input_size)
        expected = shape if self.transpose_b else shape[::-1]
        if tuple(weight.shape) != expected:
            raise ValueError(f"ColumnParallelLinear got a weight of shape {tuple(weight.shape)}, expected {expected}.")
        return weight


class RowParallelLinear(_ParallelLinear):
    """Row-parallel linear layer `x A^T + b`: input features are cut over the group, partial products summed.

    Args: as `ColumnParallelLinear`, and
        input_is_parallel (bool): the input is already this rank's part `[..., in / tp]`; otherwise it is cut here.

    Inputs: `input_ [..., in / tp]`. Outputs: `[..., out]` (`[s / tp, b, out]` under sequence parallelism), and the bias
    (with `skip_bias_add`) or None.

    Raises:
        ValueError: sizes that do not divide, arguments without effect, sequence parallelism with a whole input.
    """

    is_column = False

    def __init__(
        self,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        input_is_parallel,
        skip_bias_add=True,
        stride=1,
        keep_master_weight_for_test=False,
        is_expert=False,
        tp_comm_buffer_name=None,
        bias_init=_ZERO,
        param_init_dtype=None,
        compute_dtype=None,
        transpose_b=True,
    ):
        super().__init__(
            input_size, output_size, config, is_expert, stride, tp_comm_buffer_name, param_init_dtype, compute_dtype
        )
        self.transpose_b = transpose_b
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError("RowParallelLinear: sequence_parallel needs input_is_parallel=True.")
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.input_size_per_partition = self.size_per_partition
        # Every rank adds the whole bias to its part of the sequence: its gradient is a partial sum then.
        self._create_parameters(init_method, bias_init if bias else None, True, keep_master_weight_for_test)

    def construct(self, input_):
        """See the class."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.group)
        fused_bias = self.bias if self.world_size == 1 and not self.skip_bias_add else None
        output = self._summed_product(input_, fused_bias)
        if self.skip_bias_add:
            return output, self.bias
        if self.bias is not None and fused_bias is None:
            output = ops.add_bias(output, cast(self.bias, output.dtype))
        return output, None

    def _summed_product(self, input_, bias):
        output = self._matmul(input_, self.weight, bias, False, False)
        if self.explicit_expert_comm:
            return output
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(output, self.group)
        return reduce_from_tensor_model_parallel_region(output, self.group)


class VocabParallelEmbedding(ParallelCell):
    """Vocabulary-parallel embedding: rows of the table are cut over the tensor-parallel group.

    Args:
        num_embeddings (int): rows of the whole table (padded vocabulary).
        embedding_dim (int): width.
        init_method: how the table starts, see `initialization.to_initializer`.
        reduce_scatter_embeddings (bool): leave the sum cut along the sequence, as `[s / tp, b, h]`.
        config: TransformerConfig or ModelParallelConfig.
        param_init_dtype: dtype of the table; default config's.
        grouping (Optional[str]): what the rows mean, kept on the weight; None for other ids than a vocabulary's.

    Inputs: ids `[b, s]` (any shape without `reduce_scatter_embeddings`). Output: `[b, s, h]`, or `[s / tp, b, h]`.

    Raises:
        ValueError: rows that do not divide; in a call, an id outside the vocabulary, ids that are no integers.
    """

    names_are_global = False

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        *,
        init_method,
        reduce_scatter_embeddings=False,
        config,
        param_init_dtype=None,
        grouping="vocab",
    ):
        super().__init__()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, rank, world_size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        settings = LayerSettings.of(config)
        table = EmbeddingTable(
            rows=num_embeddings,
            width=embedding_dim,
            initializer=to_initializer(init_method, settings.embedding_init_std),
            is_cut=True,
            grouping=grouping,
            draw_dtype=settings.embedding_init_dtype,
        )
        self.create_parameters(table.describe(settings.part(param_init_dtype)))

    def construct(self, input_):
        """See the class."""
        check_integer("token ids", input_)
        if self.reduce_scatter_embeddings:
            input_ = mint.transpose(input_, 0, 1).contiguous()
        output = ops.embedding_lookup(self.weight, input_, self.vocab_start_index, self.vocab_end_index, self.num_embeddings)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(output)
        return reduce_from_tensor_model_parallel_region(output)


def build_linear(linear, config, **arguments):
    """Build the cell of a `layout` Linear; `arguments` are the constructor's others, which `linear` does not hold."""
    kind = RowParallelLinear
    if linear.column:
        kind, arguments = ColumnParallelLinear, {"grouping": linear.grouping, **arguments}
    return kind(
        linear.input_size,
        linear.output_size,
        config=config,
        init_method=linear.initializer,
        bias=linear.bias is not None,
        bias_init=linear.bias,
        stride=linear.stride,
        is_expert=linear.expert,
        **arguments,
    )
