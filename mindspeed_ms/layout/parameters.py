"""The global view of a model's state: for each rank, each parameter that it holds.

`describe_parameters(config, coordinates)` is computed from the configuration alone. Initialisation, checkpoints,
conversion, gradient-norm de-duplication and the planner read this one description.
"""

from dataclasses import dataclass
from math import prod

from mindspeed_ms.layout.gpt_sizes import read_initializers, read_sizes
from mindspeed_ms.layout.options import Options
from mindspeed_ms.layout.ranks import Coordinates
from mindspeed_ms.layout.sharding import FlatSlice, Initializer, ParameterSharding, join, uncovered
from mindspeed_ms.layout.stages import StageLayout, stages_from_config

__all__ = [
    "FlatSlice",
    "Initializer",
    "ParameterDescription",
    "ParameterSharding",
    "count_parameters",
    "describe_parameters",
    "describe_whole_model",
    "join",
    "uncovered",
]

_BIASES = (".bias", ".beta")
WORD_EMBEDDINGS = "language_model.embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ParameterDescription:
    """One parameter on one rank.

    Attributes:
        name (str): global state-dict key: global layer index, global expert index.
        sharding (ParameterSharding): what this rank holds of it.
        dtype (str): "float32", "bfloat16" or "float16".
        initializer (Initializer): how it starts; a copy like its original.
        tensor_parallel (bool): cut over the tensor-parallel group (the expert-tensor one for experts); False: replicated.
        sequence_parallel (bool): its gradient is summed over the tensor-parallel group under sequence parallelism.
        shared (bool): one of the two copies of a tied embedding (first and last stage).
        expert (bool): belongs to an expert; its gradient is averaged over the expert-data-parallel group.
        decay (bool): weight decay applies (neither one-dimensional nor a bias).
        grouping (Optional[str]): what the rows (of grouped experts the columns) mean: "qkv" (per kv group `[q.., k, v]`),
            "gate_up" (`[gate; up]`), "vocab", or None.
        local_name (str): key inside this rank's model; differs from `name` only for experts (local index).
        chunk (int): virtual pipeline chunk that holds it.
        layer (Optional[int]): global layer index; None outside the layers.
        shared_with (Optional[str]): name of the parameter that this one is a copy of; a copy is counted nowhere.
        trainable (bool): False for state without gradient (the router's expert bias, moved by the load of the experts).
    """

    name: str
    sharding: ParameterSharding
    dtype: str
    initializer: Initializer
    tensor_parallel: bool = False
    sequence_parallel: bool = False
    shared: bool = False
    expert: bool = False
    decay: bool = True
    grouping: str | None = None
    local_name: str = ""
    chunk: int = 0
    layer: int | None = None
    shared_with: str | None = None
    trainable: bool = True

    def __post_init__(self):
        if not self.local_name:
            object.__setattr__(self, "local_name", self.name)

    def counts_in_norm(self, coordinates):
        """True on the ranks that add this parameter to a global norm, each element once per data-parallel copy."""
        rank = coordinates.expert_tp if self.expert else coordinates.tp
        return self.trainable and counts_once(self.tensor_parallel, self.shared_with is not None, rank)


def counts_once(tensor_parallel, is_copy, tensor_rank):
    """Megatron's rule of the ranks that count a parameter: no copy, and of what all tensor ranks hold the first's."""
    return not is_copy and (tensor_parallel or tensor_rank == 0)


def decays(name, shape):
    """Megatron's rule of what weight decay applies to: neither biases nor one-dimensional parameters."""
    return len(shape) > 1 and not name.endswith(_BIASES)


class _GPTDescriber:
    """Collects the descriptions of one rank in module order."""

    def __init__(self, config, coordinates, stages, whole=False):
        self.options = options = Options(config)
        self.coordinates = coordinates
        self.stages = stages
        self.sizes = read_sizes(config)
        self.with_experts = _layers_with_experts(self.sizes, config)
        self.initial = read_initializers(config, stages.num_layers)
        self.tp = 1 if whole else options.tensor_model_parallel_size
        self.ep = 1 if whole else options.expert_model_parallel_size
        self.expert_tp = self.tp if whole else options.expert_tensor_parallel_size or self.tp
        self.descriptions = []
        self.chunk, self.layer = 0, None

    def describe(self):
        """All chunks of the rank's stage."""
        stage = self.coordinates.pp
        for chunk in range(self.stages.vpp):
            self.chunk = chunk
            if self.stages.has_embedding(stage, chunk):
                self._embedding()
            for layer in self.stages.layers(stage, chunk):
                self.layer = layer
                self._layer(f"language_model.encoder.layers.{layer}")
            self.layer = None
            if self.stages.has_head(stage, chunk):
                self._head()
        return self.descriptions

    def _add(self, name, sharding, initializer, **flags):
        self.descriptions.append(
            ParameterDescription(
                name,
                sharding,
                self.sizes.dtype,
                initializer,
                tensor_parallel=sharding.axis is not None,
                decay=decays(name, sharding.global_shape),
                chunk=self.chunk,
                layer=self.layer,
                **flags,
            )
        )

    def _rows(self, shape):
        """Rows cut over the tensor-parallel group."""
        return ParameterSharding.contiguous(shape, 0, self.coordinates.tp, self.tp)

    def _embedding(self):
        sizes, std = self.sizes, self.initial.embedding
        shared = sizes.tied and self.stages.pp > 1
        self._add(WORD_EMBEDDINGS, self._rows((sizes.vocab, sizes.hidden)), std, shared=shared, grouping="vocab")
        prefix = "language_model.embedding"
        if sizes.positions:
            shape = (sizes.positions, sizes.hidden)
            is_cut = self.options.parallel_position_embedding
            sharding = self._rows(shape) if is_cut else ParameterSharding.replicated(shape)
            self._add(f"{prefix}.position_embeddings.weight", sharding, std)
        if sizes.token_types:
            sharding = ParameterSharding.replicated((sizes.token_types, sizes.hidden))
            self._add(f"{prefix}.tokentype_embeddings.weight", sharding, std)

    def _head(self):
        sizes = self.sizes
        if self.options.use_final_norm:
            self._norm("language_model.encoder.final_norm")
        if sizes.tied and self.stages.pp == 1:
            return
        # the tied copy is drawn by the original's name
        initializer = self.initial.embedding if sizes.tied else self.initial.block
        self._add(
            "language_model.output_layer.weight",
            self._rows((sizes.vocab, sizes.hidden)),
            initializer,
            shared=sizes.tied,
            shared_with=WORD_EMBEDDINGS if sizes.tied else None,
            grouping="vocab",
        )

    def _layer(self, prefix):
        options = self.options
        self._norm(f"{prefix}.input_norm")
        self._attention(f"{prefix}.attention")
        if options.use_sandwich_norm:
            self._norm(f"{prefix}.attn_post_norm", options.attn_post_norm_scale)
        self._norm(f"{prefix}.post_attention_norm")
        if self.layer in self.with_experts:
            self._experts(f"{prefix}.mlp")
        else:
            self._mlp(f"{prefix}.mlp", self.sizes.ffn, self.coordinates.tp, self.tp)
        if options.use_sandwich_norm:
            self._norm(f"{prefix}.ffn_post_norm", options.ffn_post_norm_scale)

    def _norm(self, prefix, scale=1.0):
        """Scale (and shift for LayerNorm) `[h]`; `scale` is the initial weight of both types."""
        sharding = ParameterSharding.replicated((self.sizes.hidden,))
        flags = {"sequence_parallel": self.sizes.sequence_parallel}
        if self.sizes.norm == "RMSNorm":
            self._add(f"{prefix}.weight", sharding, Initializer.constant(scale), **flags)
            return
        self._add(f"{prefix}.gamma", sharding, Initializer.constant(scale), **flags)
        self._add(f"{prefix}.beta", sharding, Initializer.zeros(), **flags)

    def _attention(self, prefix):
        sizes, options = self.sizes, self.options
        self._add(f"{prefix}.qkv_proj.weight", self._rows((sizes.qkv_rows, sizes.hidden)), self.initial.block, grouping="qkv")
        if options.add_bias_linear or options.qkv_has_bias:
            self._add(f"{prefix}.qkv_proj.bias", self._rows((sizes.qkv_rows,)), self.initial.bias, grouping="qkv")
        has_bias = options.add_bias_linear or options.out_proj_has_bias
        self._row_parallel(f"{prefix}.out_proj", sizes.attention, has_bias, self.coordinates.tp, self.tp)

    def _row_parallel(self, prefix, columns, has_bias, index, count, **flags):
        """`weight [h, columns]` cut along its columns and a whole `bias [h]`."""
        hidden = self.sizes.hidden
        sharding = ParameterSharding.contiguous((hidden, columns), 1, index, count)
        self._add(f"{prefix}.weight", sharding, self.initial.output, **_named(flags, "weight"))
        if has_bias:
            flags = {**_named(flags, "bias"), "sequence_parallel": self.sizes.sequence_parallel}
            self._add(f"{prefix}.bias", ParameterSharding.replicated((hidden,)), self.initial.bias, **flags)

    def _mlp(self, prefix, ffn, index, count, local_prefix=None, expert=False):
        sizes = self.sizes
        has_bias = self.options.add_bias_linear or self.options.mlp_has_bias
        local = local_prefix or prefix
        cut = ParameterSharding.gated if sizes.gated else ParameterSharding.contiguous
        grouping = "gate_up" if sizes.gated else None
        flags = {"expert": expert, "local_name": f"{local}.mapping", "grouping": grouping}
        weight = cut((sizes.mapping_rows(ffn), sizes.hidden), 0, index, count)
        self._add(f"{prefix}.mapping.weight", weight, self.initial.block, **_named(flags, "weight"))
        if has_bias:
            bias = cut((sizes.mapping_rows(ffn),), 0, index, count)
            self._add(f"{prefix}.mapping.bias", bias, self.initial.bias, **_named(flags, "bias"))
        flags = {"expert": expert, "local_name": f"{local}.projection"}
        self._row_parallel(f"{prefix}.projection", ffn, has_bias, index, count, **flags)

    def _experts(self, prefix):
        sizes, at = self.sizes, self.coordinates
        router = ParameterSharding.replicated((sizes.experts, sizes.hidden))
        self._add(f"{prefix}.router.gating.weight", router, self.initial.block, sequence_parallel=sizes.sequence_parallel)
        if sizes.expert_bias:
            sharding = ParameterSharding.replicated((sizes.experts,))
            self._add(f"{prefix}.router.expert_bias", sharding, Initializer.zeros(), trainable=False)
        local_experts = sizes.experts // self.ep
        first = at.ep * local_experts
        if sizes.grouped:
            self._grouped_experts(f"{prefix}.experts", first, first + local_experts)
        for local in () if sizes.grouped else range(local_experts):
            names = (f"{prefix}.experts.local_experts.{which}" for which in (first + local, local))
            self._mlp(next(names), sizes.expert_ffn, at.expert_tp, self.expert_tp, next(names), expert=True)
        if sizes.shared_ffn:
            self._mlp(f"{prefix}.shared_experts", sizes.shared_ffn, at.tp, self.tp)

    def _grouped_experts(self, prefix, first, last):
        """The experts `first..last` of `weight1 [experts, h, ffn]` (`[gate, up]` columns) and `weight2 [experts, ffn, h]`."""
        sizes, index, count = self.sizes, self.coordinates.expert_tp, self.expert_tp
        rows = sizes.mapping_rows(sizes.expert_ffn)
        cut = ParameterSharding.gated if sizes.gated else ParameterSharding.contiguous
        grouping = "gate_up" if sizes.gated else None
        weight1 = cut((sizes.experts, sizes.hidden, rows), 2, index, count).of_rows(first, last)
        self._add(f"{prefix}.weight1", weight1, self.initial.block, expert=True, grouping=grouping)
        weight2 = ParameterSharding.contiguous((sizes.experts, sizes.expert_ffn, sizes.hidden), 1, index, count)
        self._add(f"{prefix}.weight2", weight2.of_rows(first, last), self.initial.output, expert=True)


def _layers_with_experts(sizes, config):
    """Global ids of the layers that hold experts."""
    stages = stages_from_config(config)
    return {
        layer
        for stage in range(stages.pp)
        for chunk in range(stages.vpp)
        for position, layer in zip(stages.positions(stage, chunk), stages.layer_slots(stage, chunk))
        if layer is not None and sizes.expert_layers[position]
    }


def _named(flags, kind):
    """`flags` with `local_name` completed by "weight" or "bias"."""
    return {**flags, "local_name": f"{flags['local_name']}.{kind}"} if "local_name" in flags else flags


def describe_parameters(config, coordinates=None, rank=None):
    """Every parameter that one rank holds, in module order.

    Args:
        config: AllConfig, TransformerConfig or an object with the same fields (`options.FIELDS`).
        coordinates (Coordinates | WorldLayout | None): where the rank is; a WorldLayout together with `rank`.
            None is the first rank.
        rank (Optional[int]): global rank, with a WorldLayout.

    Returns:
        list[ParameterDescription]

    Raises:
        LayoutError: a size that its parallel size does not divide, or layers that do not fit the stages.
    """
    if coordinates is None:
        coordinates = Coordinates()
    elif rank is not None:
        coordinates = coordinates.coordinates(rank)
    return _GPTDescriber(config, coordinates, stages_from_config(config)).describe()


def describe_whole_model(config):
    """Every parameter of the model once and whole, in module order: list[ParameterDescription]."""
    whole = StageLayout(((stages_from_config(config).num_layers,),))
    return _GPTDescriber(config, Coordinates(), whole, whole=True).describe()


def count_parameters(config):
    """Number of trained parameters of the whole model; a tied embedding counts once."""
    return sum(prod(one.sharding.global_shape) for one in describe_whole_model(config) if one.trainable)
