"""Configurations of published models (`configs/moe`): their parameters, and that they are the model of its config.json."""

import os

import pytest

from mindspeed_ms.config import init_configs_from_yaml
from mindspeed_ms.config.report import report
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.families import families
from mindspeed_ms.models.families.configuration import check_expressible, read_configuration, settings_of

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "vocab_size": 32000,
}
# file: (config.json, lines of the report)
MODELS = {
    "deepseek_v3": (
        DEEPSEEK_V3,
        (
            "682,636,472,320 parameters",
            "38,240,382,976 of them active per token: 8 of 256 experts in 58 of 61 layers",
            "experts of such a layer on each rank: 4 of 256, each cut over 1 ranks",
            "1024 ranks: dp64 tp1 pp16 cp1 ep64",
            "layers per stage: 4/4/4/4/4/4/4/4/4/4/4/4/4/4/3/2",
        ),
    ),
    "mixtral_8x7b": (
        MIXTRAL,
        (
            "46,702,792,704 parameters",
            "12,879,925,248 of them active per token: 2 of 8 experts in 32 of 32 layers",
            "64 ranks: dp8 tp2 pp4 cp1 ep8",
            "layers per stage: 8/8/8/8",
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_layout(name):
    config, lines = MODELS[name]
    all_config = init_configs_from_yaml(os.path.join(ROOT, "configs", "moe", f"{name}.yaml"))
    text = report(all_config)
    assert all(line in text for line in lines), text
    family = families()[config["model_type"]]
    ours, theirs = settings_of(all_config), settings_of(read_configuration(family, config, "config.json"))
    paths = {path for rule in family.rules for path in rule.paths} | set(family.settings)
    different = {path for path in paths if ours[path] != theirs[path] and (ours[path] or theirs[path])}
    # null takes norm_epsilon, and 8 / 4
    assert different <= {"model_config.qk_layernorm_epsilon", "moe_config.moe_router_group_score_topk"}
    check_expressible(family, ours)
    for path in different:
        assert ours[path] is None
        with pytest.raises(CheckpointError, match=path):
            check_expressible(family, {**ours, path: 3})
