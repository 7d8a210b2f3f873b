"""ParameterDescription: name, shape, cut, initializer and flags of one parameter on one rank."""

from dataclasses import dataclass, replace

from mindspeed_ms.layout.sharding import Initializer, ParameterSharding

_BIASES = (".bias", ".beta")


@dataclass(frozen=True)
class ParameterDescription:
    """Description of one parameter on one rank; `tensor_parallel.create_parameter` makes the Parameter from it.

    Attributes:
        name (str): global state-dict key: global layer index, global expert index. In a layer that is not yet part of
            a model: relative to the layer.
        sharding (ParameterSharding): what this rank holds of it.
        dtype (str): "float32", "bfloat16" or "float16".
        initializer (Initializer): how it starts; a copy like its original.
        tensor_parallel (bool): cut over the tensor-parallel group (the expert-tensor one for experts); False: replicated.
        sequence_parallel (bool): its gradient is summed over the tensor-parallel group, whose ranks saw different tokens
            (or, of norms of queries and keys, different heads).
        shared (bool): one of the two copies of a tied embedding (first and last stage).
        expert (bool): belongs to an expert; its gradient is averaged over the expert-data-parallel group.
        grouping (Optional[str]): what the rows (of grouped experts the columns) mean: "qkv" (per kv group `[q.., k, v]`),
            "gate_up" (`[gate; up]`), "vocab", or None.
        local_name (str): key inside this rank's model; differs from `name` only for experts (local index).
        chunk (int): virtual pipeline chunk that holds it.
        layer (Optional[int]): global layer index; None outside the layers.
        shared_with (Optional[str]): name of the parameter that this one is a copy of; a copy is counted nowhere.
        trainable (bool): False for state without gradient (the router's expert bias, moved by the load of the experts).
        draw_dtype (Optional[str]): dtype that initial values are rounded to before they get `dtype`; None: `dtype`.
    """

    name: str
    sharding: ParameterSharding
    dtype: str
    initializer: Initializer
    tensor_parallel: bool = False
    sequence_parallel: bool = False
    shared: bool = False
    expert: bool = False
    grouping: str | None = None
    local_name: str = ""
    chunk: int = 0
    layer: int | None = None
    shared_with: str | None = None
    trainable: bool = True
    draw_dtype: str | None = None

    def __post_init__(self):
        if not self.local_name:
            object.__setattr__(self, "local_name", self.name)

    @property
    def decay(self):
        """Whether weight decay applies (neither one-dimensional nor a bias)."""
        return decays(self.name, self.sharding.global_shape)

    def under(self, prefix, local_prefix=None):
        """The description with its names inside the part `prefix` of a model, called `local_prefix` on this rank."""
        return replace(
            self,
            name=f"{prefix}.{self.name}",
            local_name=f"{local_prefix or prefix}.{self.local_name}",
            shared_with=self.shared_with and f"{prefix}.{self.shared_with}",
        )

    def original_name(self, local_name):
        """Global key of the initial values: for a tied copy its original's."""
        return local_name.removesuffix(self.local_name) + (self.shared_with or self.name)

    def counts_in_norm(self, coordinates):
        """True on the ranks that add this parameter to a global norm, each element once per data-parallel copy.

        Megatron's rule: of a tied embedding the first stage's copy, of replicated parameters the first tensor rank's.
        """
        rank = coordinates.expert_tp if self.expert else coordinates.tp
        is_copy = self.shared and coordinates.pp > 0
        return self.trainable and not is_copy and (self.tensor_parallel or rank == 0)


def decays(name, shape):
    """Whether weight decay applies, by Megatron's rule: neither to biases nor to one-dimensional parameters."""
    return len(shape) > 1 and not name.endswith(_BIASES)
