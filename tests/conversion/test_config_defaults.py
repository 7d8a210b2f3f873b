"""Fields of config.json as our settings and back: what a left out field means in each family, rules, errors."""

import pytest

from mindspeed_ms.config import RopeScalingConfig
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.families import families, family_of
from mindspeed_ms.models.families.configuration import read_configuration, settings_of, write_configuration

SIZES = {
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 96,
    "max_position_embeddings": 64,
}
NO_BIAS = {"qkv_has_bias": False, "out_proj_has_bias": False, "mlp_has_bias": False}
LLAMA = {
    "norm_epsilon": 1e-6,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "rotary_base": 1e4,
    "rope_scaling": None,
    "sliding_window": None,
    "kv_channels": 2,
    "num_query_groups": 96,
    "qk_layernorm": False,
    "init_method_std": 0.02,
    "seq_length": 64,
    **NO_BIAS,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "qk_layernorm_epsilon": 1e-6,
    "rotary_interleaved": True,
    "kv_channels": 192,
}
QWEN_EXPERTS = {"moe_aux_loss_coeff": 0.001, "norm_topk_prob": False, "moe_router_pre_softmax": True, "moe_layer_freq": None}
# what transformers 5.24 means by a config.json without further fields
DEFAULTS = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 4096, "num_query_groups": 8},
    "mixtral": {
        **LLAMA,
        "norm_epsilon": 1e-5,
        "rotary_base": 1e6,
        "num_query_groups": 8,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.001,
        "moe_router_pre_softmax": False,
    },
    "qwen2": {**LLAMA, "qkv_has_bias": True, "num_query_groups": 32},
    "qwen2_moe": {
        **LLAMA,
        **QWEN_EXPERTS,
        "qkv_has_bias": True,
        "num_query_groups": 16,
        "num_experts": 60,
        "moe_router_topk": 4,
        "moe_shared_expert_intermediate_size": 5632,
        "moe_shared_expert_gate": True,
    },
    "qwen3": {**LLAMA, "qk_layernorm": True, "kv_channels": 128, "num_query_groups": 32},
    "qwen3_moe": {
        **LLAMA,
        **QWEN_EXPERTS,
        "qk_layernorm": True,
        "num_query_groups": 4,
        "num_experts": 128,
        "moe_router_topk": 8,
    },
    "deepseek_v2": {
        **LLAMA,
        **LATENT,
        "num_experts": 64,
        "moe_ffn_hidden_size": 1407,
        "moe_router_topk": 6,
        "n_shared_experts": 2,
        "moe_router_topk_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": None,
        "moe_router_score_function": "softmax",
    },
    "deepseek_v3": {
        **LLAMA,
        **LATENT,
        "num_experts": 256,
        "moe_ffn_hidden_size": 2048,
        "moe_router_topk": 8,
        "n_shared_experts": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "norm_topk_prob": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "gpt_oss": {
        **LLAMA,
        **dict.fromkeys(NO_BIAS, True),
        "norm_epsilon": 1e-5,
        "rotary_base": 150000.0,
        "kv_channels": 64,
        "num_query_groups": 8,
        "num_experts": 128,
        "moe_router_topk": 4,
        "moe_router_has_bias": True,
        "softmax_type": "learnable",
        "sliding_window": 128,
        "window_attn_skip_freq": [1, 0, 1, 0],
        "hidden_act": "clamped_swiglu",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": None,
            "mscale": 1.0,
            "mscale_all_dim": None,
            "truncate": False,
        },
    },
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "ffn_hidden_size": 3072,
        "num_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_tanh",
        "norm_epsilon": 1e-5,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "untie_embeddings_and_output_weights": False,
        "bias_gelu_fusion": False,
    },
}


def read(family, **fields):
    """Settings by name; those of experts too."""
    config = fields if family == "gpt2" else {**_fields(family), **fields}
    all_config = read_configuration(families()[family], config, "config.json")
    found = settings_of(all_config)
    return {path.partition(".")[2]: found[path] for path in sorted(found)}


def taken(found, wanted):
    return {name: found[name] for name in wanted}


@pytest.mark.parametrize("family", DEFAULTS)
def test_fields_that_are_left_out(family):
    assert set(DEFAULTS) == set(families())
    assert taken(read(family), DEFAULTS[family]) == DEFAULTS[family]


YARN = {"rope_type": "yarn", "factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    "family, fields, wanted",
    [
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {"hidden_act": "gelu_tanh"}),
        ("gpt2", {"n_embd": 96, "n_head": 4}, {"ffn_hidden_size": 384, "kv_channels": 24}),
        ("llama", {"num_key_value_heads": None}, {"num_query_groups": 96, "group_query_attention": False}),
        ("mistral", {"num_key_value_heads": None}, {"num_query_groups": 96}),
        ("llama", {"mlp_bias": True, "attention_bias": True}, dict.fromkeys(NO_BIAS, True)),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": None}, {"rotary_base": 5e5}),
        ("llama", {"rope_parameters": {"factor": 2.0, "type": "linear"}}, {"factor": 2.0}),
        ("llama", {"rope_scaling": YARN}, {"original_max_position_embeddings": 64, "mscale": 1.0}),
        ("llama", {"rope_scaling": {**YARN, "mscale": 0.7}}, {"mscale": 1.0, "mscale_all_dim": None}),
        ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}, {"mscale": 0.7, "mscale_all_dim": 0.5}),
        ("mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}, {"q_lora_rank": None, "rotary_interleaved": False}),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, {"num_experts": 256}),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            {"moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_score_topk": 1},
        ),
        ("gpt_oss", {"sliding_window": None}, {"sliding_window": None, "window_attn_skip_freq": None}),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_scaling": None, "rotary_base": 5.0},
        ),
        ("qwen3_moe", {"sliding_window": 8}, {"sliding_window": None}),
        ("qwen3_moe", WINDOW, {"sliding_window": 8}),
        ("qwen2", {**WINDOW, "max_window_layers": 1}, {"sliding_window": 8, "window_attn_skip_freq": [0, 1, 1, 1]}),
        ("qwen2", {**WINDOW, "max_window_layers": 0}, {"sliding_window": 8, "window_attn_skip_freq": None}),
        ("qwen2", WINDOW, {"sliding_window": None, "window_attn_skip_freq": None}),  # from layer 28 on
        (
            "qwen2",
            {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
            {"sliding_window": 8, "window_attn_skip_freq": [1, 0, 1, 0]},
        ),
        ("qwen2_moe", {"decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1, 0, 1]}),
        ("qwen2_moe", {"mlp_only_layers": [1]}, {"moe_layer_freq": [1, 0, 1, 1]}),
    ],
)
def test_fields_and_settings(family, fields, wanted):
    found = read(family, **fields)
    assert taken({**found, **(found["rope_scaling"] or {})}, wanted) == wanted


@pytest.mark.parametrize(
    "family, fields, text",
    [
        ("gpt2", {"scale_attn_weights": False}, "config.json: scale_attn_weights is False: expected True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True: expected False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh': expected one of gelu_new"),
        ("llama", {"pretraining_tp": 3}, "pretraining_tp is 3"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected True or False"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, not 1.0"),
        ("llama", {"rope_scaling": {**YARN, "beta_medium": 3}}, "rope_scaling of the type yarn has beta_medium"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no factor"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling is [1]: expected a mapping"),
        ("llama", {"num_key_value_heads": 7}, "num_key_value_heads"),  # the name that config.json has
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2: expected num_attention_heads 96"),
        ("deepseek_v3", {"v_head_dim": 1.5}, "v_head_dim is 1.5: expected an integer"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq': expected 'fp8'"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "no n_group or topk_group"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8': expected 'mxfp4'"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types is ['chunked_attention'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ("qwen2", {**WINDOW, "layer_types": ["sliding_attention"]}, "for each of 4 layers"),
        ("qwen2", {**WINDOW, "layer_types": ["chunked_attention"] * 4}, "layer_types is ['chunked_attention'"),
    ],
)
def test_fields_that_are_refused(family, fields, text):
    with pytest.raises(CheckpointError) as error:
        read(family, **fields)
    assert text in str(error.value) and "model_config.num_query_groups" not in str(error.value)


@pytest.mark.parametrize(
    "family, model, experts, base, wanted",
    [
        ("gpt2", {"hidden_act": "gelu", "bias_gelu_fusion": True}, {}, None, {"activation_function": "gelu_new"}),
        ("gpt2", {"hidden_act": "gelu"}, {}, None, {"activation_function": "gelu"}),
        ("llama", {"num_query_groups": 1, "group_query_attention": False}, {}, None, {"num_key_value_heads": 96}),
        ("llama", {}, {"moe_router_topk": 3}, None, {"model_type": "llama"}),  # of no effect without experts
        ("llama", {"rope_scaling": RopeScalingConfig(type="yarn", mscale=0.7)}, {}, None, {"rope_scaling": (8.0, None)}),
        ("llama", {"rotary_base": 5e5}, {}, {"rope_parameters": {"rope_theta": 3.0}}, {"rope_theta": 5e5}),
        ("qwen3_moe", {"sliding_window": 8}, {}, None, {"sliding_window": 8, "use_sliding_window": True}),
        ("qwen2", {"window_attn_skip_freq": [2], "sliding_window": 8}, {}, None, {"max_window_layers": 0}),
        ("qwen2_moe", {}, {"moe_layer_freq": [2]}, None, {"mlp_only_layers": [1, 3]}),
        ("deepseek_v3", {"qk_head_dim": 32}, {}, {"quantization_config": {"quant_method": "fp8"}}, {"qk_nope_head_dim": 32}),
        ("gpt_oss", {"window_attn_skip_freq": [4]}, {}, None, {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    ],
)
def test_written_fields(family, model, experts, base, wanted):
    all_config = read_configuration(families()[family], _fields(family), "config.json")
    for section, values in ((all_config.model_config, model), (all_config.moe_config, experts)):
        section.fill(**values)
    found = write_configuration(families()[family], all_config, base)
    found |= found.get("rope_parameters", {})  # kept where they were
    assert "quantization_config" not in found  # weights are written in full
    if isinstance(found.get("rope_scaling"), dict):
        found["rope_scaling"] = found["rope_scaling"]["factor"], found["rope_scaling"].get("mscale")
    assert taken(found, wanted) == wanted


def _fields(family):
    if family == "gpt2":
        return {"n_embd": 96, "n_head": 4}
    required = {"deepseek_v2": {"num_experts_per_tok": 6}}
    return {**SIZES, **({"moe_intermediate_size": 16} if "_moe" in family else required.get(family, {}))}


@pytest.mark.parametrize(
    "family, model, text",
    [
        ("llama", {"out_proj_has_bias": True}, "has one field attention_bias for model_config.qkv_has_bias = False, "),
        ("llama", {"normalization": "LayerNorm"}, "llama models have model_config.normalization = 'RMSNorm'"),
        ("gpt2", {"kv_channels": 48}, "gpt2 models have model_config.kv_channels = 24, but the checkpoint's has 48"),
        ("llama", {"sliding_window": 8}, "llama models have model_config.sliding_window = None, but the checkpoint's has 8"),
        ("llama", {"rotary_seq_len_interpolation_factor": 2.0}, "llama models have model_config.rotary_seq_len_interpol"),
        ("mistral", {"window_attn_skip_freq": [2]}, "has one sliding_window for all layers"),
        ("qwen3_moe", {"moe_router_num_groups": 2}, "qwen3_moe models have moe_config.moe_router_num_groups = None"),
    ],
)
def test_settings_that_a_family_cannot_say(family, model, text):
    all_config = read_configuration(families()[family], _fields(family), "config.json")
    section = all_config.moe_config if family == "qwen3_moe" else all_config.model_config
    section.fill(**model)
    with pytest.raises(CheckpointError) as error:
        write_configuration(families()[family], all_config)
    assert text in str(error.value)


def test_a_family_by_its_architecture():
    assert family_of({"architectures": ["MistralForCausalLM"]}, "config.json").name == "mistral"
    with pytest.raises(CheckpointError, match=r"model_type 'LlamaForCausalLM, Mine' is of no known|model_type"):
        family_of({"architectures": ["BertModel"]}, "config.json")
    with pytest.raises(CheckpointError, match=r"has no model_type: expected one of"):
        family_of({}, "config.json")
