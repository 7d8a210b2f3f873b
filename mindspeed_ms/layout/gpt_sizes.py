"""Sizes of a GPT model, read from a configuration and checked once."""

from dataclasses import dataclass

from mindspeed_ms.layout.divisibility import require_fit
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.experts import expert_pattern, expert_problems, expert_width, shared_expert_width
from mindspeed_ms.layout.options import OTHER_POSITIONS, Options, uses_sequence_parallel
from mindspeed_ms.layout.sharding import Initializer

GATED_ACTIVATIONS = ("swiglu", "fused_swiglu")
LEARNED_POSITIONS = ("learned_absolute", "absolute")
NORMALIZATIONS = {"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm", "FusedRMSNorm": "RMSNorm"}


def true_vocab_size(vocab_size, extra_ids=0, tokenizer_type=None):
    """Rows of a vocabulary before it is padded: its own, the extra ids, and the token that ends documents of Megatron's
    NullTokenizer, which stands behind the vocabulary."""
    return vocab_size + (extra_ids or 0) + (tokenizer_type == "NullTokenizer")


def padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size):
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``, as Megatron does."""
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True)
class GPTSizes:
    """What `describe_parameters` needs to know of a configuration.

    `qkv_rows` is `groups * (heads / groups + 2) * head_dim`, `attention` is `heads * head_dim`. `expert_ffn` is the width
    inside an expert, `shared_ffn` that of all shared experts together (0: none), `expert_layers` tells for each position
    of the layers whether it holds experts.
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
    expert_ffn: int
    shared_ffn: int
    expert_layers: tuple[bool, ...]
    grouped: bool
    expert_bias: bool
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

    def mapping_rows(self, ffn):
        """Rows of the first weight of an MLP of the width `ffn`: doubled for gated activations."""
        return 2 * ffn if self.gated else ffn


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
    return options.hidden_size // options.num_attention_heads


def read_sizes(config):
    """`GPTSizes` of a configuration.

    Raises:
        LayoutError: an unknown normalisation or position type, a size that its parallel size does not divide, or layers
            with experts that do not suit the model.
    """
    options = Options(config)
    if options.normalization not in NORMALIZATIONS:
        raise LayoutError(f"normalization '{options.normalization}' is unknown, choose one of {list(NORMALIZATIONS)}.")
    heads = options.num_attention_heads
    groups = options.num_query_groups if options.group_query_attention else heads
    require_fit(config)
    for name, problem, other in expert_problems(options):
        raise LayoutError(f"{name} {getattr(options, name)} {problem} ({other} {getattr(options, other)}).")
    return GPTSizes(
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
        expert_ffn=expert_width(options)[1],
        shared_ffn=shared_expert_width(options)[1],
        expert_layers=tuple(expert_pattern(options)),
        grouped=options.moe_grouped_gemm,
        expert_bias=options.moe_router_enable_expert_bias,
        tied=not options.untie_embeddings_and_output_weights,
        norm=NORMALIZATIONS[options.normalization],
        dtype=options.params_dtype,
        sequence_parallel=uses_sequence_parallel(options),
    )


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
