"""Sizes of a GPT model on one rank, checked once: every divisibility rule of tensor and expert parallelism."""

from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.options import Options
from mindspeed_ms.layout.sharding import Initializer

GATED_ACTIVATIONS = ("swiglu", "fused_swiglu")
LEARNED_POSITIONS = ("learned_absolute", "absolute")
OTHER_POSITIONS = ("rope", "none")
NORMALIZATIONS = {"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm", "FusedRMSNorm": "RMSNorm"}


def padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size):
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``, as Megatron does."""
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True)
class GPTSizes:
    """What `describe_parameters` needs to know of a configuration.

    `qkv_rows` is `groups * (heads / groups + 2) * head_dim`, `attention` is `heads * head_dim`, `mapping_rows` is the
    ffn size, doubled for gated activations.
    """

    vocab: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    gated: bool
    positions: int
    token_types: int
    experts: int
    tied: bool
    norm: str
    dtype: str
    sequence_parallel: bool

    @property
    def attention(self):
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def qkv_rows(self):
        """Rows of the packed query, key and value weight."""
        return self.attention + 2 * self.groups * self.head_dim

    @property
    def mapping_rows(self):
        """Rows of the first MLP weight."""
        return 2 * self.ffn if self.gated else self.ffn


def _divides(name, size, by, count):
    if size % count:
        raise LayoutError(f"{name} {size} must be divisible by {by} {count}.")


def _positions(options):
    """Rows of the learned position table; 0 without one."""
    kind = options.position_embedding_type
    if kind in OTHER_POSITIONS or not options.add_position_embedding:
        return 0
    if kind not in LEARNED_POSITIONS:
        known = [*LEARNED_POSITIONS, *OTHER_POSITIONS]
        raise LayoutError(f"position_embedding_type '{kind}' is unknown, choose one of {known}.")
    rows = options.max_position_embeddings or options.seq_length
    if not rows:
        raise LayoutError(f"position_embedding_type '{kind}' needs seq_length or max_position_embeddings.")
    return rows


def _head_dim(options):
    if options.kv_channels:
        return options.kv_channels
    _divides("hidden_size", options.hidden_size, "num_attention_heads", options.num_attention_heads)
    return options.hidden_size // options.num_attention_heads


def read_sizes(config):
    """`GPTSizes` of a configuration.

    Raises:
        LayoutError: an unknown normalisation or position type, or a size that its parallel size does not divide.
    """
    options = Options(config)
    if options.normalization not in NORMALIZATIONS:
        raise LayoutError(f"normalization '{options.normalization}' is unknown, choose one of {list(NORMALIZATIONS)}.")
    heads = options.num_attention_heads
    groups = options.num_query_groups if options.group_query_attention else heads
    _divides("num_attention_heads", heads, "num_query_groups", groups)
    sizes = GPTSizes(
        vocab=options.vocab_size,
        hidden=options.hidden_size,
        heads=heads,
        groups=groups,
        head_dim=_head_dim(options),
        ffn=options.ffn_hidden_size,
        gated=options.gated_linear_unit or options.hidden_act in GATED_ACTIVATIONS,
        positions=_positions(options),
        token_types=options.num_tokentypes,
        experts=options.num_experts if options.num_experts > 1 else 0,
        tied=not options.untie_embeddings_and_output_weights,
        norm=NORMALIZATIONS[options.normalization],
        dtype=options.params_dtype,
        sequence_parallel=options.sequence_parallel and options.tensor_model_parallel_size > 1,
    )
    _check_divisibility(sizes, options)
    return sizes


def _check_divisibility(sizes, options):
    tp = options.tensor_model_parallel_size
    by = "tensor_model_parallel_size"
    _divides("num_attention_heads", sizes.heads, by, tp)
    _divides("num_query_groups", sizes.groups, by, tp)
    _divides("padded vocab_size", sizes.vocab, by, tp)
    if options.parallel_position_embedding and sizes.positions:
        _divides("max_position_embeddings", sizes.positions, by, tp)
    if not sizes.experts:
        _divides("ffn_hidden_size", sizes.ffn, by, tp)
        return
    expert_tp = options.expert_tensor_parallel_size or tp
    _divides("ffn_hidden_size", sizes.ffn, "expert_tensor_parallel_size", expert_tp)
    _divides("num_experts", sizes.experts, "expert_model_parallel_size", options.expert_model_parallel_size)


def read_initializer(value, std, name):
    """`Initializer` of a configured `value`: "normal" (with `std`), "zeros", "ones", or a number.

    Raises:
        LayoutError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Initializer.constant(value)
    if value == "normal":
        return Initializer.normal(std)
    if value in ("zeros", "ones"):
        return Initializer(value)
    raise LayoutError(f"{name} {value!r} is unknown, choose 'normal', 'zeros', 'ones' or a number.")


@dataclass(frozen=True)
class GPTInitializers:
    """How the kinds of parameters start.

    Attributes:
        block: weights of layers, router and untied head: normal with `init_method_std`.
        output: weights that end a sublayer: the same with std / sqrt(2 * layers), unless `scaled_output_init` is False.
        embedding: normal with `embedding_init_std`, by default `init_method_std`.
        bias: `bias_init`, by default zeros.
    """

    block: Initializer
    output: Initializer
    embedding: Initializer
    bias: Initializer


def read_initializers(config, num_layers):
    """`GPTInitializers` of a configuration with `num_layers` layers that hold weights."""
    options = Options(config)
    std = options.init_method_std
    embedding_std = std if options.embedding_init_std is None else options.embedding_init_std
    output_std = std / (2.0 * num_layers) ** 0.5 if options.scaled_output_init else std
    return GPTInitializers(
        block=read_initializer(options.init_method, std, "init_method"),
        output=read_initializer(options.init_method, output_std, "init_method"),
        embedding=read_initializer(options.init_method, embedding_std, "init_method"),
        bias=read_initializer(options.bias_init, std, "bias_init"),
    )
