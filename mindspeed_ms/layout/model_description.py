"""ModelDescription and ParallelDescription: the model and its parallel layout, read once from a configuration.

`config.describe_model` builds it from an AllConfig or a TransformerConfig. Fields have the names of the configuration's
and no defaults; properties give derived values. Nothing is checked here: `divisibility.check_model` does.
"""

from dataclasses import dataclass
from functools import cached_property

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.experts import expert_pattern, expert_width, shared_expert_width
from mindspeed_ms.layout.sharding import Initializer
from mindspeed_ms.layout.stages import StageLayout, stages_of
from mindspeed_ms.layout.windows import has_window

GATED_ACTIVATIONS = ("swiglu", "fused_swiglu", "clamped_swiglu")
LEARNED_POSITIONS = ("learned_absolute", "absolute")
OTHER_POSITIONS = ("rope", "none")  # position types without a table of parameters
NORMALIZATIONS = {"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm", "FusedRMSNorm": "RMSNorm"}
POLICY_ARCHITECTURE = "gpt_policy"  # a GPT with the head of values beside that of logits: policy and critic
REWARD_ARCHITECTURE = "gpt_reward"  # a GPT whose head gives one value per token, not logits


@dataclass(frozen=True, kw_only=True)
class ParallelDescription:
    """Parallel layout: order of ranks, parallel sizes, layers per stage. Fields: `parallel_config`'s."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    context_parallel_algo: str
    ulysses_degree_in_cp: int | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    order: str
    sequence_parallel: bool
    gradient_accumulation_fusion: bool
    virtual_pipeline_model_parallel_size: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    microbatch_group_size_per_virtual_pipeline_stage: int | None
    num_layer_list: tuple | None
    num_layer_list_order: str
    noop_layers: tuple | None
    standalone_embedding_stage: bool
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    recompute: tuple | None
    select_recompute: tuple | None
    select_comm_recompute: tuple | None
    variable_seq_lengths: bool
    overlap_p2p_comm: bool
    deallocate_pipeline_outputs: bool
    recv_dtype: str | None

    @property
    def expert_tensor_size(self):
        """Tensor-parallel size inside experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def cuts_sequence(self):
        """Whether activations between tensor-parallel regions are cut along the sequence."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1


@dataclass(frozen=True)
class ModelInitializers:
    """Initializers of each kind of parameter.

    Attributes:
        block: weights of layers, router and untied head: normal with `init_method_std`.
        output: weights that end a sublayer: the same with std / sqrt(2 * layers), unless `scaled_output_init` is False.
        embedding: normal with `embedding_init_std`.
        bias: `bias_init`.
    """

    block: Initializer
    output: Initializer
    embedding: Initializer
    bias: Initializer


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Model and parallel layout (`parallel`). Fields: `model_config`'s and `moe_config`'s, and those listed.

    Attributes:
        architecture (str): kind of the "embedding", "layer" and "head" describers, see `describers.registry`.
        adapters (tuple[Adapter]): see `layout.adapters`; with one, everything else is frozen.
        num_tokentypes (int): rows of the token type table; 0 without one.
        kv_channels (Optional[int]): width of a head where it was given; None follows from hidden_size, see `head_dim`.
        micro_batch_size (int): rows of a micro-batch.
    """

    architecture: str
    adapters: tuple
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    seq_length: int
    micro_batch_size: int
    max_position_embeddings: int
    position_embedding_type: str
    add_position_embedding: bool
    parallel_position_embedding: bool
    num_tokentypes: int
    attention_type: str
    group_query_attention: bool
    num_query_groups: int
    kv_channels: int | None
    qk_layernorm: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    softmax_type: str
    sliding_window: int | None
    window_attn_skip_freq: tuple | None
    add_bias_linear: bool
    qkv_has_bias: bool
    out_proj_has_bias: bool
    mlp_has_bias: bool
    hidden_act: str
    gated_linear_unit: bool
    normalization: str
    use_sandwich_norm: bool
    attn_post_norm_scale: float
    ffn_post_norm_scale: float
    use_final_norm: bool
    untie_embeddings_and_output_weights: bool
    init_method: str | float
    bias_init: str | float
    init_method_std: float
    embedding_init_std: float
    embedding_init_dtype: str
    scaled_output_init: bool
    params_dtype: str
    compute_dtype: str
    residual_connection_dtype: str
    calculate_per_token_loss: bool
    num_experts: int
    moe_ffn_hidden_size: int | None
    moe_router_topk: int
    moe_grouped_gemm: bool
    moe_layer_freq: tuple | None
    first_k_dense_replace: int | None
    n_shared_experts: int | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_router_enable_expert_bias: bool
    moe_router_has_bias: bool
    parallel: ParallelDescription
    mtp_num_layers: int | None = None

    @property
    def gives_values(self):
        """Whether the head gives one value per token, as of a reward model, instead of logits."""
        return self.architecture == REWARD_ARCHITECTURE

    @property
    def has_critic(self):
        """Whether a head of values stands beside that of logits."""
        return self.architecture == POLICY_ARCHITECTURE

    @property
    def is_latent(self):
        """Whether keys and values are compressed (multi-latent attention)."""
        return self.attention_type == "multi_latent"

    @property
    def rotary_width(self):
        """Width of the part of a head that has rotary positions, before `rotary_percent`."""
        return self.qk_pos_emb_head_dim if self.is_latent else self.head_dim

    @property
    def latent_width(self):
        """Width of what the cache holds of a token under multi-latent attention: compressed, and the key with positions."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    @property
    def has_learned_sinks(self):
        """Whether each head has a learned score without a value in its softmaxes."""
        return self.softmax_type == "learnable"

    @property
    def head_dim(self):
        """Width of one head of queries and keys."""
        if self.is_latent:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self):
        """Number of key-value heads (query groups); under multi-latent attention each query head has its own."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def attention_width(self):
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def is_gated(self):
        """Whether the first weight of an MLP is `[gate; up]`."""
        return self.gated_linear_unit or self.hidden_act in GATED_ACTIVATIONS

    @property
    def has_mlp_bias(self):
        """Whether linears of an MLP have a bias."""
        return self.add_bias_linear or self.mlp_has_bias

    @property
    def has_position_table(self):
        """Whether positions are learned, from a table."""
        return self.position_embedding_type not in OTHER_POSITIONS and self.add_position_embedding

    @property
    def is_tied(self):
        """Whether the head uses the word embeddings."""
        return not self.untie_embeddings_and_output_weights

    @property
    def norm(self):
        """ "LayerNorm" or "RMSNorm". LayoutError for an unknown `normalization`."""
        if self.normalization not in NORMALIZATIONS:
            raise LayoutError(f"normalization '{self.normalization}' is unknown, choose one of {list(NORMALIZATIONS)}.")
        return NORMALIZATIONS[self.normalization]

    @property
    def expert_ffn_size(self):
        """Width inside one expert."""
        return expert_width(self)[1]

    @property
    def shared_expert_ffn_size(self):
        """Width of all shared experts together; 0 without them."""
        return shared_expert_width(self)[1]

    @cached_property
    def stages(self):
        """`StageLayout`: layers of each stage and chunk. LayoutError as `split_layers`."""
        return stages_of(self.num_layers, self.parallel)

    @property
    def whole_stages(self):
        """`StageLayout` of the same layers on one rank."""
        return StageLayout(((self.stages.num_layers,),))

    @cached_property
    def layers_with_experts(self):
        """Global ids of the layers that hold experts: frozenset[int]."""
        pattern, stages = expert_pattern(self), self.stages
        return frozenset(
            layer
            for stage in range(stages.pp)
            for chunk in range(stages.vpp)
            for position, layer in zip(stages.positions(stage, chunk), stages.layer_slots(stage, chunk))
            if layer is not None and pattern[position]
        )

    def mlp_kind(self, layer):
        """Kind of the feed-forward block of the global layer `layer`: "experts" or "dense"."""
        return "experts" if layer in self.layers_with_experts else "dense"

    def window_of(self, layer):
        """How many tokens, itself included, a token attends to in the global layer `layer`: int, or None for all."""
        return self.sliding_window if has_window(self, layer) else None

    @cached_property
    def initializers(self):
        """`ModelInitializers`. LayoutError for an unknown `init_method` or `bias_init`."""
        std = self.init_method_std
        output_std = std / (2.0 * self.stages.num_layers) ** 0.5 if self.scaled_output_init else std
        return ModelInitializers(
            block=read_initializer(self.init_method, std, "init_method"),
            output=read_initializer(self.init_method, output_std, "init_method"),
            embedding=read_initializer(self.init_method, self.embedding_init_std, "init_method"),
            bias=read_initializer(self.bias_init, std, "bias_init"),
        )


def read_initializer(value, std, name):
    """Convert a configured `value` to an `Initializer`: "normal" (with `std`), "zeros", "ones", or a number.

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
