"""Megatron's `args` of a checkpoint that is written: those that were kept from a source, or made from our configuration."""

import argparse

from mindspeed_ms.config.argument_table import TABLE
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.megatron import kept, names
from mindspeed_ms.core.dist_checkpointing.torch_file import Global
from mindspeed_ms.core.logging import logger
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS
from mindspeed_ms.layout.ranks import world_unit

_SECTIONS = ("model_config", "moe_config", "parallel_config", "training_config", "dataset_config", "optimizer_config")
# sizes of the layout, by Megatron's names: equal ones leave the arguments as they were
_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"),
)


# numbers of Llama 3's rule that Megatron fixes
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def arguments_of(manifest, config, style, distributed, ckpt_format="torch", experts=None):
    """Arguments (dict) of a checkpoint in the layout of `config`.

    Args:
        manifest (Manifest): of the source.
        config (AllConfig): model and layout of the target.
        style (str): names in the files.
        distributed (bool): with the distributed optimizer.
        ckpt_format (str): Megatron's name of the format.
        experts (Optional[str]): form of the experts, one of `names.EXPERT_FORMS`; None without any.
    """
    saved = manifest.foreign.get(kept.NAME, {}).get("args")
    values = kept.restored(saved) if saved else _made(config, manifest.args)
    wanted = _layout(config)
    if any(values.get(name) != wanted[name] for name in _LAYOUT if name in values or wanted[name] not in (None, 1)):
        values.update(wanted)
        _cut_layers(values, config)
    noops = config.parallel_config.noop_layers
    if noops or values.get("noop_layers"):
        layers = config.model_config.num_layers
        values.update(num_layers=layers, encoder_num_layers=layers, noop_layers=",".join(map(str, noops)) if noops else None)
    dtype = manifest.tensors[WORD_EMBEDDINGS].dtype
    if getattr(values.get("params_dtype"), "name", None) != dtype:
        values.update(params_dtype=Global("torch", dtype), bf16=dtype == "bfloat16", fp16=dtype == "float16")
    if saved is None and values["vocab_size"] is None:
        values["vocab_size"] = manifest.vocab_size
    values["padded_vocab_size"] = config.model_config.vocab_size
    values["use_distributed_optimizer"] = distributed
    values["ckpt_format"] = ckpt_format
    state = manifest.states.get("train_state") or {}
    values["consumed_train_samples"] = state.get("consumed_train_samples", 0)
    values["consumed_valid_samples"] = state.get("consumed_valid_samples", 0)
    if experts is not None:
        values["moe_grouped_gemm"] = experts != names.SEQUENTIAL
        if experts != names.SEQUENTIAL and style == names.TRANSFORMER_ENGINE:
            values["moe_use_legacy_grouped_gemm"] = experts == names.GROUPED
    is_legacy = style in (names.LEGACY, names.OLD_LEGACY)
    if is_legacy != bool(values.get("use_legacy_models")):
        values["use_legacy_models"] = is_legacy
    if (not is_legacy and saved is None) or style == names.TRANSFORMER_ENGINE:
        values["transformer_impl"] = names.TRANSFORMER_ENGINE if style == names.TRANSFORMER_ENGINE else "local"
    return values


def namespace(values, rank):
    """Namespace of one rank."""
    return argparse.Namespace(**{**values, "rank": rank, "local_rank": rank})


def _layout(config):
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    expert, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tensor
    world = world_unit(tensor, pipeline, 1, expert, expert_tensor)
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "transformer_pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "context_parallel_size": 1,
        "sequence_parallel": bool(parallel.sequence_parallel),
        "data_parallel_size": world // (tensor * pipeline),
        "world_size": world,
    }


def _cut_layers(values, config):
    """Options that say which stage has which layers."""
    stages = describe_model(config).stages
    values["num_layers_per_virtual_pipeline_stage"] = stages.counts[0][0] if stages.vpp > 1 else None
    values["num_virtual_stages_per_pipeline_rank"] = None
    values["decoder_first_pipeline_num_layers"] = values["decoder_last_pipeline_num_layers"] = None
    values["account_for_embedding_in_pipeline_split"] = values["account_for_loss_in_pipeline_split"] = False
    totals = stages.stage_totals
    if len(set(totals)) > 1:
        if len(set(totals[1:-1])) > 1:
            logger.warning("stages of %s layers: Megatron's options only say how many the first and the last one have", totals)
        values["decoder_first_pipeline_num_layers"], values["decoder_last_pipeline_num_layers"] = totals[0], totals[-1]


def _made(config, saved):
    """Arguments from a configuration: Megatron's defaults, then what our fields hold under Megatron's names."""
    values = {row.name: row.megatron_default for row in TABLE if row.megatron_default is not ... and row.flags + row.off_flags}
    sections = {**{name: saved.get(name) or {} for name in _SECTIONS}, **config.to_dict()}
    for row in TABLE:
        has_flag = row.flags or row.off_flags
        if (
            has_flag
            and row.path
            and not row.is_alias
            and (row.convert is None or row.section in ("model_config", "moe_config"))
        ):
            found, value = _value_at(sections, row.path)
            if found:
                values[row.name] = value
    model, moe = config.model_config, config.moe_config
    gated = model.gated_linear_unit or "swiglu" in model.hidden_act
    dtype = Global("torch", str(model.params_dtype).rpartition(".")[2])
    data = saved.get("dataset_config") or {}
    has_biases = model.add_bias_linear or (model.qkv_has_bias and model.out_proj_has_bias and model.mlp_has_bias)
    scaling = sections["model_config"].get("rope_scaling") or {}
    groups = model.num_query_groups if model.group_query_attention else None
    values.update(
        swiglu=gated,
        squared_relu=False,
        openai_gelu=False,
        onnx_safe=None,
        normalization="RMSNorm" if "RMS" in model.normalization else "LayerNorm",
        position_embedding_type="rope" if model.position_embedding_type == "rope" else _positions(model),
        use_rotary_position_embeddings=model.position_embedding_type == "rope",
        add_position_embedding=True,
        use_rope_scaling=scaling.get("type") == "llama3",
        rope_scaling_factor=scaling.get("factor") or 8.0,
        rotary_seq_len_interpolation_factor=_interpolation(model, scaling),
        window_size=(model.sliding_window - 1, 0) if model.sliding_window else None,
        moe_ffn_hidden_size=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        moe_layer_freq=_layer_frequency(moe),
        group_query_attention=bool(model.group_query_attention),
        num_query_groups=groups or 1,
        rotary_interleaved=model.rotary_interleaved and not model.multi_latent_attention,
        add_bias_linear=has_biases,
        add_qkv_bias=model.qkv_has_bias and not has_biases,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        num_layers=model.num_layers,
        encoder_num_layers=model.num_layers,
        encoder_seq_length=model.seq_length,
        num_experts=moe.num_experts if moe.num_experts > 1 else None,
        params_dtype=dtype,
        bf16=dtype.name == "bfloat16",
        fp16=dtype.name == "float16",
        vocab_size=data.get("vocab_size"),
        tokenizer_type=data.get("tokenizer_type"),
        iteration=0,
        finetune=False,
        no_load_optim=None,
        no_load_rng=None,
        **_layout(config),
    )
    _cut_layers(values, config)
    for text in _not_said(model, scaling):
        logger.warning("%s: our programs read it back, Megatron computes otherwise", text)
    return {name: _plain(value) for name, value in values.items()}


def _interpolation(model, scaling):
    """Megatron's argument of the linear rule."""
    factor = scaling.get("factor") if scaling.get("type") == "linear" else model.rotary_seq_len_interpolation_factor
    return int(factor) if factor and float(factor).is_integer() else factor


def _not_said(model, scaling):
    """What Megatron has no argument for: list[str]."""
    kind, texts = scaling.get("type"), []
    if kind not in (None, "linear", "llama3"):
        texts.append(f"Megatron's args have no rope_scaling of the type {kind}")
    if kind == "llama3":
        others = [f"{name} {scaling[name]}" for name, value in _LLAMA3.items() if scaling.get(name, value) != value]
        if others:
            texts.append(f"Megatron's --use-rope-scaling has {_LLAMA3}, not {', '.join(others)}")
    if model.multi_latent_attention and not model.rotary_interleaved:
        texts.append("Megatron's multi_latent_attention rotates neighbouring pairs (rotary_interleaved)")
    if model.multi_latent_attention and model.qkv_has_bias:
        texts.append("Megatron's multi_latent_attention has no biases of its projections (qkv_has_bias)")
    if model.multi_latent_attention and model.qk_layernorm_epsilon not in (None, model.norm_epsilon):
        texts.append("Megatron has one norm_epsilon, no qk_layernorm_epsilon")
    if model.sliding_window and model.window_attn_skip_freq:
        texts.append("Megatron core 0.12 has no windows of some layers only (window_attn_skip_freq)")
    return texts


def _value_at(sections, path):
    """(whether the configuration holds `path`, its value)."""
    value = sections
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _layer_frequency(moe):
    frequency = moe.moe_layer_freq or 1
    return frequency[0] if isinstance(frequency, (list, tuple)) and len(frequency) == 1 else frequency


def _positions(model):
    return "learned_absolute" if "absolute" in model.position_embedding_type else model.position_embedding_type


def _plain(value):
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str, Global)) else str(value)
