"""Parameters of each kind of layer: linear, embedding, norm, router, grouped experts.

The cells of `core.tensor_parallel` and `legacy.model` create their parameters from these objects, and the describers of
whole models put the same objects under prefixes: shape, cut, initializer and flags of a parameter have one source.
"""

from dataclasses import dataclass

from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.sharding import Initializer, ParameterSharding


@dataclass(frozen=True)
class LayerPart:
    """Tensor-parallel part of a layer on one rank.

    Attributes:
        index, count (int): rank and size of the group that the layer is cut over.
        dtype (str): of the parameters.
        sequence_parallel (bool): replicated parameters see a part of the sequence: their gradient is a partial sum.
    """

    index: int
    count: int
    dtype: str
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear layer cut over tensor-parallel ranks: its outputs (column-parallel) or its inputs (row-parallel).

    Attributes:
        column (bool): column-parallel, with the bias cut as well; else row-parallel, with a whole bias.
        input_size, output_size (int): features of the whole layer.
        initializer (Initializer): of the weight.
        bias (Optional[Initializer]): None without a bias.
        has_weight (bool): False where the weight comes with each call (tied embeddings).
        stride (int): equal blocks, each cut over the ranks; 2 for `[gate; up]`.
        grouping (Optional[str]): see `ParameterDescription`.
        expert (bool): part of an expert.
        transpose_b (bool): the weight is `[out, in]`; else `[in, out]`.
    """

    column: bool
    input_size: int
    output_size: int
    initializer: Initializer
    bias: Initializer | None
    has_weight: bool = True
    stride: int = 1
    grouping: str | None = None
    expert: bool = False
    transpose_b: bool = True

    def describe(self, part):
        """Descriptions of `weight` and `bias`: list[ParameterDescription]."""
        common = {"expert": self.expert, "grouping": self.grouping}
        result = []
        if self.has_weight:
            shape, axis = (self.output_size, self.input_size), 0 if self.column else 1
            if not self.transpose_b:
                shape, axis = shape[::-1], 1 - axis
            result.append(self._cut("weight", shape, axis, part, self.initializer, common))
        if self.bias is not None and self.column:
            result.append(self._cut("bias", (self.output_size,), 0, part, self.bias, common))
        elif self.bias is not None:
            whole = ParameterSharding.replicated((self.output_size,))
            flags = {**common, "sequence_parallel": part.sequence_parallel}
            result.append(ParameterDescription("bias", whole, part.dtype, self.bias, **flags))
        return result

    def _cut(self, name, shape, axis, part, initializer, common):
        sharding = ParameterSharding.contiguous(shape, axis, part.index, part.count, self.stride)
        return ParameterDescription(name, sharding, part.dtype, initializer, tensor_parallel=True, **common)


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """Table `[rows, width]`; `is_cut` cuts the rows over tensor-parallel ranks. `draw_dtype`, `grouping`: see
    `ParameterDescription`."""

    rows: int
    width: int
    initializer: Initializer
    is_cut: bool
    grouping: str | None = None
    draw_dtype: str | None = None

    def describe(self, part):
        """Description of `weight`: list[ParameterDescription]."""
        shape = (self.rows, self.width)
        whole = ParameterSharding.replicated(shape)
        sharding = ParameterSharding.contiguous(shape, 0, part.index, part.count) if self.is_cut else whole
        flags = {"tensor_parallel": self.is_cut, "grouping": self.grouping, "draw_dtype": self.draw_dtype}
        return [ParameterDescription("weight", sharding, part.dtype, self.initializer, **flags)]


@dataclass(frozen=True)
class Norm:
    """Norm over `width` elements: `weight` (RMSNorm) or `gamma` and `beta` (LayerNorm); the first starts as `scale`.

    `over_heads`: it is applied to each head, of which a rank has a part: its gradient is a partial sum even where the
    sequence is whole.
    """

    kind: str
    width: int
    scale: float = 1.0
    over_heads: bool = False

    def describe(self, part):
        """Descriptions of the norm's parameters: list[ParameterDescription]."""
        started = {"weight": self.scale} if self.kind == "RMSNorm" else {"gamma": self.scale, "beta": 0.0}
        sharding = ParameterSharding.replicated((self.width,))
        flags = {"sequence_parallel": part.sequence_parallel or (self.over_heads and part.count > 1)}
        return [
            ParameterDescription(name, sharding, part.dtype, Initializer.constant(value), **flags)
            for name, value in started.items()
        ]


@dataclass(frozen=True, kw_only=True)
class WholeLinear:
    """Linear layer that every tensor-parallel rank holds whole: `weight [out, in]` and, unless it is None, `bias [out]`."""

    input_size: int
    output_size: int
    initializer: Initializer
    bias: Initializer | None

    def describe(self, part):
        """Descriptions of `weight` and `bias`: list[ParameterDescription]."""
        started = {"weight": ((self.output_size, self.input_size), self.initializer), "bias": ((self.output_size,), self.bias)}
        return [
            ParameterDescription(
                name, ParameterSharding.replicated(shape), part.dtype, initializer, sequence_parallel=part.sequence_parallel
            )
            for name, (shape, initializer) in started.items()
            if initializer is not None
        ]


@dataclass(frozen=True)
class Sinks:
    """Score of each head without a value, in its softmaxes: `softmax_offset [heads]`, cut like the heads."""

    heads: int
    initializer: Initializer

    def describe(self, part):
        """Description of the scores: list[ParameterDescription]."""
        sharding = ParameterSharding.contiguous((self.heads,), 0, part.index, part.count)
        return [ParameterDescription("softmax_offset", sharding, part.dtype, self.initializer, tensor_parallel=True)]


@dataclass(frozen=True)
class Router:
    """Router of a mixture of experts: `gating.weight [experts, h]`, with `bias` its `gating.bias [experts]`, and with
    `has_bias` `expert_bias [experts]`, which balances the load.
    """

    experts: int
    hidden_size: int
    initializer: Initializer
    has_bias: bool
    bias: Initializer | None = None

    def describe(self, part):
        """Descriptions of the router's parameters: list[ParameterDescription]."""
        return [one.under("gating") for one in self.describe_gating(part)] + self.describe_bias()

    def describe_gating(self, part):
        """Descriptions of `weight` and `bias` inside of `gating`: list[ParameterDescription]."""
        sharding = ParameterSharding.replicated((self.experts, self.hidden_size))
        flags = {"sequence_parallel": part.sequence_parallel}
        weight = ParameterDescription("weight", sharding, part.dtype, self.initializer, **flags)
        if self.bias is None:
            return [weight]
        sharding = ParameterSharding.replicated((self.experts,))
        return [weight, ParameterDescription("bias", sharding, part.dtype, self.bias, **flags)]

    def describe_bias(self):
        """Description of `expert_bias`, in float32 like Megatron's: its steps are small. Empty without one."""
        if not self.has_bias:
            return []
        sharding = ParameterSharding.replicated((self.experts,))
        return [ParameterDescription("expert_bias", sharding, "float32", Initializer.zeros(), trainable=False)]


@dataclass(frozen=True)
class SharedExpertGate:
    """Gate of the shared experts of a layer: `gate_weight [1, h]`."""

    hidden_size: int
    initializer: Initializer

    def describe(self, part):
        """Description of the gate: list[ParameterDescription]."""
        sharding = ParameterSharding.replicated((1, self.hidden_size))
        flags = {"sequence_parallel": part.sequence_parallel}
        return [ParameterDescription("gate_weight", sharding, part.dtype, self.initializer, **flags)]


@dataclass(frozen=True)
class GroupedExperts:
    """Experts in two tensors: `weight1 [experts, h, ffn]` (gated: `[gate, up]` columns) and `weight2 [experts, ffn, h]`.

    `mapping` and `projection` are the Linears of one expert.
    """

    experts: int
    mapping: Linear
    projection: Linear

    def describe(self, part, first, last):
        """Descriptions of the weights of experts `first` to `last`: list[ParameterDescription]."""
        result = []
        for name, linear, axis in (("weight1", self.mapping, 2), ("weight2", self.projection, 1)):
            shape = (self.experts, linear.input_size, linear.output_size)
            sharding = ParameterSharding.contiguous(shape, axis, part.index, part.count, linear.stride)
            flags = {"tensor_parallel": True, "expert": True, "grouping": linear.grouping}
            result.append(ParameterDescription(name, sharding.of_rows(first, last), part.dtype, linear.initializer, **flags))
        return result
