"""Fields of config.json: wrong kinds, contradictions, and what our models do not compute are refused by name."""

import re

import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.families import family_of
from mindspeed_ms.models.families.configuration import read_configuration, settings_of, write_configuration
from mindspeed_ms.models.families.unsupported import NEUTRAL
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from tests.conversion.test_hugging_face import convert, read_tensors, without
from tests.conversion.tiny_models import CONFIGS, read_json, tensors_of, write_folder


def read(name, **changes):
    config = {**CONFIGS[name], **changes}
    return read_configuration(family_of(config, "config.json"), config, "config.json")


LINEAR, LLAMA3 = {"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
WRONG = [
    *(("llama", "rms_norm_eps", value) for value in ("1e-5", True, -1e-5, 0, float("nan"))),
    *(("llama", "hidden_size", value) for value in ("32", 32.0, -32, 0, 34)),
    *(("llama", "num_hidden_layers", value) for value in ("4", 0, -1, 10**12)),
    *(("llama", "num_key_value_heads", value) for value in ("2", 0, 8, 3)),
    *(("llama", "head_dim", value) for value in ("8", 0, -4, 15)),
    *(("llama", "vocab_size", value) for value in ("64", -1, 1.5)),
    *(("llama", "max_position_embeddings", value) for value in ("64", -1, 0)),
    ("llama", "intermediate_size", None),
    *(("llama", "hidden_act", value) for value in ("gelu", ["silu"])),
    *(("llama", name, "0.02") for name in ("initializer_range", "attention_dropout")),
    *(("llama", name, value) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings") for value in ("true", 1)),
    *(("llama", "rope_theta", value) for value in ("1e4", True, -1, 0)),
    *(("llama", "rope_scaling", {**LINEAR, "factor": value}) for value in ("2.0", True, -2.0)),
    *(("llama", "rope_scaling", value) for value in ("linear", {"rope_type": ["linear"]}, {"type": "longrope"})),
    *(("llama", "rope_scaling", value) for value in ({"mrope_section": [1, 2]}, {**LLAMA3, "high_freq_factor": 0.5})),
    ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}),
    *(("llama", "rope_parameters", value) for value in ([1], {"rope_theta": 1e6})),  # rope_theta says another one
    *(("qwen3", "rope_parameters", value) for value in ({"rope_theta": "1e6"}, {"full_attention": {"rope_theta": 1e6}})),
    ("qwen3", "rope_parameters", {"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
    ("llama_linear", "rope_parameters", {**LINEAR, "factor": 3.0}),
    ("llama", "architectures", ["MistralForCausalLM"]),
    ("llama", "pretraining_tp", True),
    *(("mistral", "sliding_window", value) for value in ("8", 0, -8, True)),
    ("mistral", "layer_types", ["full_attention"] * 4),
    *(("qwen2", "use_sliding_window", value) for value in ("yes", 1)),
    *(("qwen2", "layer_types", value) for value in (["sliding_attention"] * 4, "full_attention")),
    *(("qwen2", "max_window_layers", value) for value in ("2", -1)),
    ("qwen2", "attention_bias", False),
    *(("qwen2_windows", "layer_types", ["full_attention"] * count) for count in (3, 5)),
    *(("qwen3_moe", "num_experts", value) for value in ("4", -1, 0)),
    *(("qwen3_moe", "num_experts_per_tok", value) for value in ("2", 5, 0)),
    *(("qwen3_moe", "decoder_sparse_step", value) for value in ("1", 0)),
    *(("qwen3_moe", "mlp_only_layers", value) for value in ([7], "1", 1, [True])),
    *(("qwen3_moe", name, "1") for name in ("moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")),
    ("qwen3_moe", "num_local_experts", 8),
    ("qwen2_moe", "shared_expert_intermediate_size", "24"),
    ("mixtral", "router_jitter_noise", "0.1"),
    *(("gpt2", "n_embd", value) for value in ("32", 34, -32)),
    *(("gpt2", name, value) for name in ("n_head", "n_inner", "n_layer", "n_positions") for value in ("4", -1, 2.5)),
    *(("gpt2", "activation_function", value) for value in ("selu", ["gelu"])),
    *(("gpt2", name, "0.1") for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "layer_norm_epsilon")),
    ("gpt2", "embd_pdrop", 0.3),
    *(("gpt2", "scale_attn_weights", value) for value in (False, 1)),
    *(("llama", name, 0.37) for name in NEUTRAL if name not in ("attention_bias", "mlp_bias", "partial_rotary_factor")),
    *(("llama", "partial_rotary_factor", value) for value in (0.5, "1", True)),
    ("llama", "layer_types", ["sliding_attention"] * 4),
    ("qwen2", "mlp_bias", True),
]
WORDS = {"rope_parameters": "rope_(parameters|scaling|theta)|partial_rotary_factor"}


@pytest.mark.parametrize("name, field, value", WRONG, ids=lambda value: str(value)[:20])
def test_a_field_that_is_wrong_or_not_computed_is_named(name, field, value):
    with pytest.raises(CheckpointError, match=rf"config\.json.*\b({WORDS.get(field, re.escape(field))})\b") as error:
        read(name, **{field: value})
    assert "model_config." not in str(error.value)


def test_values_that_ask_for_nothing_are_taken():
    neutral = {name: values[0] for name, values in NEUTRAL.items() if name not in ("attention_bias", "mlp_bias")}
    expected = settings_of(read("llama"))
    assert settings_of(read("llama", **neutral, layer_types=["full_attention"] * 4)) == expected
    assert settings_of(read("mixtral", rms_norm_eps=None))["model_config.norm_epsilon"] == 1e-5  # as transformers has it
    assert settings_of(read("qwen2", sliding_window=0)) == settings_of(read("qwen2"))


def test_the_fields_of_transformers_5():
    """`rope_parameters` and `num_local_experts` are read, and a trained model's values are written under the same names."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    base = {name: value for name, value in CONFIGS["llama_linear"].items() if name != "rope_scaling"}
    new = {**base, "rope_parameters": {"rope_theta": 10000.0, **scaling}}
    config = read("llama_linear", rope_scaling=None, rope_parameters=new["rope_parameters"])
    assert settings_of(config) == settings_of(read("llama_linear", rope_scaling=scaling))
    family = family_of(new, "config.json")
    assert write_configuration(family, config, new) == new
    config.model_config.rotary_base = 2e6
    assert write_configuration(family, config, new) == {**base, "rope_parameters": {"rope_theta": 2e6, **scaling}}
    experts = {name: value for name, value in CONFIGS["qwen3_moe"].items() if name != "num_experts"}
    experts["num_local_experts"] = 4
    config = read("qwen3_moe", num_experts=None, num_local_experts=4)
    assert config.moe_config.num_experts == 4
    config.moe_config.num_experts = 2
    written = write_configuration(family_of(experts, "config.json"), config, experts)
    assert written["num_local_experts"] == 2 and "num_experts" not in written


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_settings_without_an_effect_are_no_other_model(name):
    """A training with Megatron's flags has Megatron's defaults, of which some say nothing about its model."""
    config, family = read(name), family_of(CONFIGS[name], "config.json")
    config.model_config.bias_gelu_fusion = True  # of gelu
    if not config.model_config.multi_latent_attention:
        config.model_config.kv_lora_rank = 7
    if config.moe_config.num_experts == 1:
        config.moe_config.moe_router_pre_softmax = True
    assert write_configuration(family, config, CONFIGS[name]) == CONFIGS[name]
    config.model_config.use_sandwich_norm = True
    with pytest.raises(CheckpointError, match=r"model_config\.use_sandwich_norm = False"):
        write_configuration(family, config, CONFIGS[name])


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_both_names_of_the_dtype(tmp_path, name):
    source, _ = write_folder(tmp_path / "model", {**CONFIGS["llama"], name: "float32"})
    again = convert(source, tmp_path / "again", "--save-model-type", "hf", "--params-dtype", "bf16")
    assert read_json(again) == {**CONFIGS["llama"], name: "bfloat16"}


def test_a_head_that_is_missing_speaks_of_the_field(tmp_path):
    tensors = without(tensors_of(CONFIGS["llama"]), "lm_head.weight")
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama"], tensors)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head.weight, .* tie_word_embeddings"):
        read_manifest(source)
    source, _ = write_folder(tmp_path / "tied", {**CONFIGS["llama"], "tie_word_embeddings": True}, tensors)
    assert read_tensors(convert(source, tmp_path / "again", "--save-model-type", "hf")) == read_tensors(source)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    folder, _ = write_folder(tmp_path, CONFIGS["llama"])
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_manifest(folder).args["model_config"]["num_layers"] == 4
