"""The one place that reads a configuration for this room.

A configuration is duck-typed: AllConfig (`.model_config`, `.parallel_config`, ...), a TransformerConfig that carries its
`.parallel_config`, or one flat object. A field that is missing, or None where None means "the default", takes the
documented default below.
"""

# field -> (section, default)
FIELDS = {
    "vocab_size": ("model_config", None),
    "num_layers": ("model_config", None),
    "hidden_size": ("model_config", None),
    "num_attention_heads": ("model_config", None),
    "ffn_hidden_size": ("model_config", None),
    "seq_length": ("model_config", None),
    "max_position_embeddings": ("model_config", None),
    "position_embedding_type": ("model_config", "absolute"),
    "add_position_embedding": ("model_config", True),
    "parallel_position_embedding": ("model_config", False),
    "num_tokentypes": ("model_config", 0),
    "group_query_attention": ("model_config", False),
    "num_query_groups": ("model_config", 32),
    "kv_channels": ("model_config", None),
    "add_bias_linear": ("model_config", False),
    "qkv_has_bias": ("model_config", True),
    "out_proj_has_bias": ("model_config", True),
    "mlp_has_bias": ("model_config", False),
    "hidden_act": ("model_config", "gelu"),
    "gated_linear_unit": ("model_config", False),
    "normalization": ("model_config", "LayerNorm"),
    "use_sandwich_norm": ("model_config", False),
    "attn_post_norm_scale": ("model_config", 1.0),
    "ffn_post_norm_scale": ("model_config", 1.0),
    "use_final_norm": ("model_config", True),
    "untie_embeddings_and_output_weights": ("model_config", False),
    "init_method": ("model_config", "normal"),
    "bias_init": ("model_config", "zeros"),
    "init_method_std": ("model_config", 0.01),
    "embedding_init_std": ("model_config", None),
    "scaled_output_init": ("model_config", True),
    "params_dtype": ("model_config", "float32"),
    "num_experts": ("moe_config", 1),
    "moe_ffn_hidden_size": ("moe_config", None),
    "moe_grouped_gemm": ("moe_config", False),
    "moe_layer_freq": ("moe_config", None),
    "first_k_dense_replace": ("moe_config", None),
    "n_shared_experts": ("moe_config", None),
    "moe_shared_expert_intermediate_size": ("moe_config", None),
    "moe_router_enable_expert_bias": ("moe_config", False),
    "tensor_model_parallel_size": ("parallel_config", 1),
    "pipeline_model_parallel_size": ("parallel_config", 1),
    "context_parallel_size": ("parallel_config", 1),
    "context_parallel_algo": ("parallel_config", "ulysses_cp_algo"),
    "ulysses_degree_in_cp": ("parallel_config", None),
    "expert_model_parallel_size": ("parallel_config", 1),
    "expert_tensor_parallel_size": ("parallel_config", None),
    "order": ("parallel_config", "tp-cp-ep-dp-pp"),
    "sequence_parallel": ("parallel_config", False),
    "virtual_pipeline_model_parallel_size": ("parallel_config", None),
    "num_layers_per_virtual_pipeline_stage": ("parallel_config", None),
    "microbatch_group_size_per_virtual_pipeline_stage": ("parallel_config", None),
    "num_layer_list": ("parallel_config", None),
    "num_layer_list_order": ("parallel_config", "pp_vpp"),
    "noop_layers": ("parallel_config", None),
    "standalone_embedding_stage": ("parallel_config", False),
    "num_layers_in_first_pipeline_stage": ("parallel_config", None),
    "num_layers_in_last_pipeline_stage": ("parallel_config", None),
    "account_for_embedding_in_pipeline_split": ("parallel_config", False),
    "account_for_loss_in_pipeline_split": ("parallel_config", False),
    "recompute_config": ("parallel_config", None),
    "recompute": ("parallel_config", None),
    "select_recompute": ("parallel_config", None),
    "select_comm_recompute": ("parallel_config", None),
}
OTHER_POSITIONS = ("rope", "none")  # position types without a table of parameters
REQUIRED = ("vocab_size", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")


def _model(config):
    """The model section of `config`, which may be that section itself."""
    model = getattr(config, "model_config", None)
    # a pydantic class has an own attribute of this name, a dict without fields
    return model if hasattr(model, "hidden_size") or hasattr(model, "num_layers") else config


def read_option(config, name):
    """The value of the field `name` of `config`, or its documented default.

    Raises:
        AttributeError: a name that this room does not know.
        ValueError: a required field (vocab_size, num_layers, ...) is missing.
    """
    if name not in FIELDS:
        raise AttributeError(f"layout reads no configuration field '{name}'.")
    section, default = FIELDS[name]
    model = _model(config)
    places = [model, config]
    if section != "model_config":
        places = [getattr(config, section, None), getattr(model, section, None), model, config]
    for place in places:
        if getattr(place, name, None) is not None:
            return getattr(place, name)
    if name in REQUIRED:
        raise ValueError(f"model_config.{name} is needed and was not set.")
    return default


def uses_sequence_parallel(config, tensor_parallel=None):
    """Whether activations between tensor-parallel regions are cut along the sequence: asked for, and there is a cut.

    `tensor_parallel` (Optional[int]) is the size of the group that is there; None: what the configuration says.
    """
    size = read_option(config, "tensor_model_parallel_size") if tensor_parallel is None else tensor_parallel
    return bool(read_option(config, "sequence_parallel")) and size > 1


class Options:
    """Attribute access to `read_option`: `Options(config).hidden_size`."""

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return read_option(self._config, name)
