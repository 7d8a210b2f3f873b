"""Keys of the 38BV3 trio and their settings; `note` is the reading where the guide is silent."""

from dataclasses import dataclass

from mindspeed_ms.config.values import read_bool, read_dtype, read_words

# operator -> (config path, None: see fused_rmsnorm)
OPERATORS = {
    "flash_attention": "model_config.use_flash_attention",
    "rope": "model_config.apply_rope_fusion",
    "rmsnorm": None,
    "swiglu": "model_config.apply_swiglu_fusion",
    "masked_softmax": "model_config.masked_softmax_fusion",
    "gradient_accumulation": "parallel_config.gradient_accumulation_fusion",
    "bias_gelu": "model_config.bias_gelu_fusion",
    "bias_swiglu": "model_config.bias_swiglu_fusion",
    "bias_dropout": "model_config.bias_dropout_fusion",
}
FUSED_RMSNORM = "fused rmsnorm"


@dataclass(frozen=True)
class TrioKey:
    """One key of the trio.

    Args:
        path: config path that it sets, "" if `convert` decides.
        convert: `convert(value) -> {config path: value}`; raises ValueError with the expected value.
        note: how it is read where the guide does not say.
    """

    path: str = ""
    convert: object = None
    note: str = ""

    def settings(self, value):
        """Settings (dict config path -> value) of a value of this key."""
        return self.convert(value) if self.convert else {self.path: value}


def _dtype(value):
    try:
        return read_dtype(value)
    except ValueError:
        raise ValueError("expects float32, float16 or bfloat16") from None


def _parameter_type(value):
    return {"model_config.params_dtype": _dtype(value), "model_config.embedding_init_dtype": _dtype(value)}


def _compute_type(value):
    name = _dtype(value)
    return {
        "model_config.compute_dtype": name,
        "training_config.bf16": name == "bfloat16",
        "training_config.fp16": name == "float16",
    }


def _softmax_type(value):
    name = _dtype(value)
    return {"model_config.softmax_compute_dtype": name, "model_config.attention_softmax_in_fp32": name == "float32"}


def _logits_type(value):
    name = _dtype(value)
    if name == "bfloat16":
        raise ValueError("expects float32 or float16: the loss is computed in one of these")
    return {"model_config.fp16_lm_cross_entropy": name == "float16"}


def _gradient_type(value):
    return {"training_config.accumulate_allreduce_grads_in_fp32": _dtype(value) == "float32"}


def _operators(switch):
    def convert(value):
        result = {}
        for name in read_words(value):
            if name not in OPERATORS:
                raise ValueError(f"does not know the operator {name!r}; expects some of {', '.join(OPERATORS)}")
            result[OPERATORS[name] or FUSED_RMSNORM] = switch
        return result

    return convert


def _attention_type(value):
    kinds = {
        "MHA": {"model_config.group_query_attention": False},
        "GQA": {"model_config.group_query_attention": True},
        "MQA": {"model_config.group_query_attention": True, "model_config.num_query_groups": 1},
    }
    if value not in kinds:
        raise ValueError("expects MHA, GQA or MQA")
    return kinds[value]


def _sequence(value):
    return {"model_config.seq_length": value, "model_config.max_position_embeddings": value}


def _shared_embedding(value):
    try:
        return {"model_config.untie_embeddings_and_output_weights": not read_bool(value)}
    except ValueError:
        raise ValueError("expects True or False") from None


def _keys(prefix, **keys):
    return {f"{prefix}.{name}": key if isinstance(key, TrioKey) else TrioKey(key) for name, key in keys.items()}


_PARALLEL = "accelerate_config.parallelization"
_LLM = "model_config.llm"
TRIO = {
    **_keys(
        "train_config.recompute_config",
        recompute="parallel_config.recompute",
        select_recompute="parallel_config.select_recompute",
        select_comm_recompute="parallel_config.select_comm_recompute",
    ),
    **_keys(
        _PARALLEL,
        tensor_parallel="parallel_config.tensor_model_parallel_size",
        use_sequence_parallel="parallel_config.sequence_parallel",
        use_distributed_optimizer="training_config.use_distributed_optimizer",
        context_parallel=TrioKey("parallel_config.context_parallel_size", note="beyond the guide"),
        context_parallel_algo=TrioKey("parallel_config.context_parallel_algo", note="beyond the guide"),
        ulysses_degree=TrioKey("parallel_config.ulysses_degree_in_cp", note="beyond the guide"),
        expert_parallel=TrioKey("parallel_config.expert_model_parallel_size", note="beyond the guide"),
    ),
    **_keys(
        f"{_PARALLEL}.pipeline",
        num_stages="parallel_config.pipeline_model_parallel_size",
        layer_list=TrioKey("parallel_config.num_layer_list", note="rows are stages, columns chunks; see num_layer_list_order"),
        micro_batch_size="dataset_config.batch_size",
        noop_layers="parallel_config.noop_layers",
        num_layers_per_vpp=TrioKey(
            "parallel_config.num_layers_per_virtual_pipeline_stage", note="with layer_list the list's columns decide"
        ),
        virtual_pipeline_model_parallel_size="parallel_config.virtual_pipeline_model_parallel_size",
    ),
    **_keys(
        "accelerate_config.precision",
        param_init_dtype=TrioKey(convert=_parameter_type, note="type in which parameters are drawn and kept (params_dtype)"),
        compute_dtype=TrioKey(convert=_compute_type, note="bfloat16 is bf16: True, float16 fp16: True; params_dtype stays"),
        softmax_compute_dtype=TrioKey(convert=_softmax_type, note="float32 is attention_softmax_in_fp32: True"),
        logits_compute_dtype=TrioKey(convert=_logits_type, note="float16 is fp16_lm_cross_entropy: True"),
        grad_accumulation_dtype=TrioKey(
            convert=_gradient_type,
            note="float32 is accumulate_allreduce_grads_in_fp32: True, another type accumulates in the parameter's",
        ),
        residual_connection=TrioKey(
            "model_config.residual_connection_dtype", note="float32 with half computation is fp32_residual_connection: True"
        ),
        fused_operators=TrioKey(convert=_operators(True), note="the fused switch of each operator named"),
        nofused_operators=TrioKey(convert=_operators(False), note="the fused switch of each operator named, off"),
    ),
    **_keys(
        f"{_LLM}.tokenizer",
        padded_size=TrioKey("model_config.vocab_size", note="needs divisibility by tp only"),
        divided_by=TrioKey("model_config.make_vocab_size_divisible_by", note="times tp, to compute a padding from vocab_size"),
        use_fast="dataset_config.use_fast_tokenizer",
        vocab_size=TrioKey("dataset_config.vocab_size", note="beyond the guide"),
        type=TrioKey("dataset_config.tokenizer_type", note="beyond the guide"),
        model=TrioKey("dataset_config.tokenizer_model", note="beyond the guide"),
        name_or_path=TrioKey("dataset_config.tokenizer_name_or_path", note="beyond the guide"),
    ),
    **_keys(
        f"{_LLM}.embedding",
        hidden_size="model_config.hidden_size",
        init_std=TrioKey("model_config.embedding_init_std", note="of the embedding only; an own head starts as the blocks do"),
    ),
    **_keys(
        f"{_LLM}.position",
        type="model_config.position_embedding_type",
        max_size=TrioKey(convert=_sequence, note="sequence length and rows of a learned position table"),
        rope_base="model_config.rotary_base",
    ),
    **_keys(
        f"{_LLM}.blocks",
        num_layers="model_config.num_layers",
        init_std="model_config.init_method_std",
        sandwich_norm="model_config.use_sandwich_norm",
    ),
    **_keys(f"{_LLM}.blocks.layernorm", norm_type="model_config.normalization", epsilon="model_config.norm_epsilon"),
    **_keys(
        f"{_LLM}.blocks.attention",
        attention_type=TrioKey(convert=_attention_type, note="GQA is group_query_attention: True"),
        head_num="model_config.num_attention_heads",
        kv_group_size=TrioKey("model_config.num_query_groups", note="the number of key/value groups, not the heads of a group"),
        qkv_bias="model_config.qkv_has_bias",
        projection_bias="model_config.out_proj_has_bias",
        dropout_rate="model_config.attention_dropout",
        post_norm_scale="model_config.attn_post_norm_scale",
    ),
    **_keys(
        f"{_LLM}.blocks.ffn",
        hidden_size="model_config.ffn_hidden_size",
        activation="model_config.hidden_act",
        dropout_rate=TrioKey(
            "model_config.hidden_dropout", note="of attention output, feed-forward output and embedding, as Megatron's"
        ),
        mlp_bias=TrioKey("model_config.mlp_has_bias", note="of the feed-forward projections only"),
        post_norm_scale="model_config.ffn_post_norm_scale",
    ),
    **_keys(
        f"{_LLM}.head",
        shared_embedding=TrioKey(convert=_shared_embedding, note="the opposite of untie_embeddings_and_output_weights"),
    ),
}
# a whole section with its own field names below a key of the trio
SECTION_KEYS = {
    "train_config.ms_training_config": "training_config",
    "train_config.optimizer_config": "optimizer_config",
    "train_config.dataset_config": "dataset_config",
    "train_config.lora_config": "lora_config",
    "train_config.moe_config": "moe_config",
    "accelerate_config.parallel_config": "parallel_config",
}
# other spellings of the guide's keys
SPELLINGS = {"residual-connection": "residual_connection"}
