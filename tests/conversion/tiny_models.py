"""Tiny Hugging Face folders of every family, made from a config.json with numpy."""

import json
import os

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.models.families import family_of
from mindspeed_ms.models.families.configuration import read_configuration
from mindspeed_ms.models.families.tensors import tensor_parts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "llama": {
        **SIZES,
        "model_type": "llama",
        "rope_theta": 5e5,
        "attention_bias": True,
        "mlp_bias": True,
        "some_field_of_yours": {"kept": [1, 2]},
    },
    "llama_linear": {**SIZES, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {
        **SIZES,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_yarn": {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**SIZES, "model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32},
    "qwen2_windows": {
        **SIZES,
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {
        **SIZES,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        **SIZES,
        **LATENT,
        **EXPERTS,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **SIZES,
        **LATENT,
        **EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": 20,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v3_further": {
        **SIZES,
        **LATENT,
        **EXPERTS,
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 2,
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 6,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 0.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3_moe": {**SIZES, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 16, "decoder_sparse_step": 2},
}


def tensors_of(config, seed=0):
    """Random values of a model's tensors: {name: float32 array}; norms are near 1."""
    family = family_of(config, "config.json")
    model = describe_model(read_configuration(family, config, "config.json"))
    random = np.random.RandomState(seed)
    parts = tensor_parts(family, model)
    tensors = {
        name: (random.standard_normal(shape) * 0.1 + (len(shape) == 1 and "norm" in name)).astype(np.float32)
        for name, shape in {part.name: part.stored_shape for part in parts if not part.is_copy}.items()
    }
    originals = {part.key: part.name for part in parts if not part.is_copy}
    return {**tensors, **{part.name: tensors[originals[part.key]] for part in parts if part.is_copy}}


def write_folder(folder, config, tensors=None, files=1, dtype="float32"):
    """Write a Hugging Face folder; returns its path and tensors.

    Args:
        config (dict): content of config.json.
        tensors (Optional[dict]): values; None: random ones.
        files (int): with an index for more than one.
        dtype (str): "bfloat16": the arrays' upper halves.
    """
    tensors = tensors_of(config) if tensors is None else tensors
    if dtype == "bfloat16":
        tensors = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    os.makedirs(folder, exist_ok=True)
    names, places = list(tensors), {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number::files]
        entries = [
            Entry(
                name,
                dtype if dtype == "bfloat16" else tensors[name].dtype.name,
                tensors[name].shape,
                tensors[name].nbytes,
                np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8),
            )
            for name in own
        ]
        write_shard(os.path.join(folder, file), entries, made_by="pt")
        places.update(dict.fromkeys(own, file))
    if files > 1:
        write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    write_json(folder, "config.json", config)
    return os.fspath(folder), tensors


def write_json(folder, name, content):
    """Write a JSON file into a folder."""
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file)


def read_json(folder, name="config.json"):
    """Read a JSON file of a folder."""
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)
