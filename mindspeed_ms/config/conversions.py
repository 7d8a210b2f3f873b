"""Conversions of Megatron arguments to settings, for arguments that are not copied as they are.

A conversion is `convert(value, view) -> {config path: value}`; `view` reads the other arguments
(`mindspeed_ms.config.arguments.ArgumentView`). An empty dict leaves everything as it is.
"""

import re

from mindspeed_ms.config.values import read_float_list, read_int, read_int_list

_LOG_LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error"}


def sets(path, fixed):
    """Conversion of a switch: a true value sets `path` to `fixed`."""

    def convert(value, view):
        del view
        return {path: fixed} if value else {}

    return convert


def num_query_groups(value, view):
    """`--num-query-groups`: Megatron's default of 1 is dropped without --group-query-attention."""
    if view.get("group_query_attention"):
        return {"model_config.num_query_groups": value}
    heads = view.get("num_attention_heads")
    if value is None or (value in (1, heads) and not view.is_typed("num_query_groups")):
        return {}
    return {"model_config.num_query_groups": value}


def query_key_layer_scaling(value, view):
    """`--apply-query-key-layer-scaling`: also puts the softmax into fp32, as in Megatron."""
    del view
    if not value:
        return {"model_config.apply_query_key_layer_scaling": value}
    return {"model_config.apply_query_key_layer_scaling": value, "model_config.attention_softmax_in_fp32": True}


def rotary_positions(value, view):
    """`--use-rotary-position-embeddings`: the older flag for --position-embedding-type rope."""
    del view
    if not value:
        return {}
    return {"model_config.use_rotary_position_embeddings": True, "model_config.position_embedding_type": "rope"}


def rope_scaling(value, view):
    """`--use-rope-scaling`: Llama 3's rule unless --rope-scaling-type names another."""
    if not value or view.is_typed("rope_scaling_type"):
        return {}
    return {"model_config.rope_scaling.type": "llama3"}


def rope_scaling_value(key):
    """Conversion of `--rope-scaling-KEY`, a number of the rule; an error without a rule (Megatron ignores it)."""
    name, path = f"rope_scaling_{key}", f"model_config.rope_scaling.{key}"

    def convert(value, view):
        asked = view.get("use_rope_scaling") or view.is_typed("rope_scaling_type")
        if not view.is_typed(name) or value is None:
            return {}
        if not asked and not view.has_files:
            view.problem(name, "has no effect without --use-rope-scaling or --rope-scaling-type")
            return {}
        return {path: value}

    return convert


def rotary_interleaved(value, view):
    """`--rotary-interleaved`: False is dropped under multi-latent attention, where Megatron rotates neighbouring pairs."""
    if not value and view.get("multi_latent_attention"):
        return {}
    return {"model_config.rotary_interleaved": value}


def latent_width(name):
    """Conversion of a rank or width of multi-latent attention: Megatron's defaults are dropped without it."""

    def convert(value, view):
        if value is None or not (view.get("multi_latent_attention") or view.is_typed(name)):
            return {}
        return {f"model_config.{name}": value}

    return convert


def rotary_scaling_factor(value, view):
    """`--rotary-scaling-factor`: yarn from a first sequence length of --max-position-embeddings, as Megatron's MLA."""
    if value in (None, 1, 1.0):
        return {}
    if not view.get("multi_latent_attention"):
        if view.is_typed("rotary_scaling_factor") and not view.has_files:
            view.problem("rotary_scaling_factor", "has no effect without --multi-latent-attention; use --rope-scaling-factor")
        return {}
    settings = {"model_config.rope_scaling.type": "yarn", "model_config.rope_scaling.factor": value}
    length = view.get("max_position_embeddings")
    if length and not view.is_typed("rope_scaling_original_max_position_embeddings"):
        settings["model_config.rope_scaling.original_max_position_embeddings"] = length
    return settings


def latent_mscale(name):
    """Conversion of `--mscale` and `--mscale-all-dim`, which count beside a --rotary-scaling-factor other than 1."""

    def convert(value, view):
        if value is None or view.get("rotary_scaling_factor") in (None, 1, 1.0) or not view.get("multi_latent_attention"):
            return {}
        return {f"model_config.rope_scaling.{name}": value}

    return convert


def exit_signal_handler(value, view):
    """`--exit-signal-handler`: taken if typed; Megatron's default is not."""
    return {"training_config.exit_signal_handler": value} if view.is_typed("exit_signal_handler") else {}


def rope_fusion(value, view):
    """`--apply-rope-fusion`: Megatron's default (on) is dropped without rope positions, as Megatron does."""
    rope = view.get("position_embedding_type") == "rope" or view.get("use_rotary_position_embeddings")
    if not rope and not view.is_typed("apply_rope_fusion"):
        return {}
    return {"model_config.apply_rope_fusion": value}


def fused_rmsnorm(value, view):
    """`--use-fused-rmsnorm`: normalization FusedRMSNorm; contradicts --normalization LayerNorm."""
    if not value:
        return {}
    if view.get("normalization") == "LayerNorm" and view.is_typed("normalization"):
        view.problem("use_fused_rmsnorm", "needs --normalization RMSNorm, but LayerNorm was given")
    return {"model_config.normalization": "FusedRMSNorm"}


def transformer_impl(value, view):
    """`--transformer-impl`: transformer_engine is ignored with a notice; layers have one implementation."""
    if value == "transformer_engine":
        view.notice(
            "transformer_impl", "transformer_engine is NVIDIA's kernel library; the layers here have one implementation, local"
        )
        return {}
    return {"model_config.transformer_impl": value} if value is not None else {}


def encoder_num_layers(value, view):
    """`--encoder-num-layers`: dropped if equal to num_layers, which Megatron fills in itself."""
    return {} if value == view.get("num_layers") else {"model_config.encoder_num_layers": value}


def zero_shard_size(value, view):
    """`--zero-shard-size`: -1 means "not set"."""
    del view
    return {"parallel_config.zero_shard_size": None if value == -1 else value}


_CP_COMM_TYPES = {
    "p2p": "megatron_cp_algo",
    "allgather": "megatron_cp_algo",
    "a2a": "ulysses_cp_algo",
    "a2a+p2p": "hybrid_cp_algo",
}


def _algorithm_of_comm_type(view):
    """Algorithm of `--cp-comm-type`; None where it was not given or has no such name."""
    kinds = view.get("cp_comm_type") or []
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return _CP_COMM_TYPES.get(kinds[0]) if view.is_typed("cp_comm_type") and len(set(kinds)) == 1 else None


def cp_comm_type(value, view):
    """`--cp-comm-type`: Megatron's names of the algorithms, one for all layers."""
    kinds = [value] if isinstance(value, str) else list(value or ())
    if not kinds or not view.is_typed("cp_comm_type"):  # Megatron's default is not a choice against context_parallel_algo
        return {}
    if set(kinds) - set(_CP_COMM_TYPES):
        view.problem("cp_comm_type", f"expects one of {', '.join(_CP_COMM_TYPES)}")
        return {}
    if len(set(kinds)) > 1:
        view.problem("cp_comm_type", "differs between layers; give one for all of them")
        return {}
    algorithm = _CP_COMM_TYPES[kinds[0]]
    if view.is_typed("context_parallel_algo") and view.get("context_parallel_algo") != algorithm:
        view.problem("cp_comm_type", f"is {algorithm}, but --context-parallel-algo says otherwise; keep one of them")
        return {}
    if kinds[0] == "allgather":
        view.notice("cp_comm_type", "keys and values go round a ring instead of being gathered, with the same numbers")
    return {"parallel_config.context_parallel_algo": algorithm}


def hierarchical_context_parallel_sizes(value, view):
    """`--hierarchical-context-parallel-sizes`: ulysses degree and ring of --cp-comm-type a2a+p2p."""
    if not value:
        return {}
    name, cp = "hierarchical_context_parallel_sizes", view.get("context_parallel_size") or 1
    try:
        sizes, cp = read_int_list(value), read_int(cp)
    except ValueError:  # a wrong context_parallel_size is its own problem
        view.problem(name, "expects two sizes that multiply to the context parallel size: ulysses degree and ring")
        return {}
    if _algorithm_of_comm_type(view) != "hybrid_cp_algo" and view.get("context_parallel_algo") != "hybrid_cp_algo":
        view.problem(name, "needs --cp-comm-type a2a+p2p")
    elif len(sizes) != 2 or sizes[0] * sizes[1] != cp:
        view.problem(name, "expects two sizes that multiply to the context parallel size: ulysses degree and ring")
    else:
        return {"parallel_config.ulysses_degree_in_cp": sizes[0]}
    return {}


def ulysses_degree(value, view):
    """`--ulysses-degree-in-cp`: dropped with a notice unless the algorithm is hybrid (the yaml reader refuses it)."""
    if value is None:
        return {}
    algorithm = _algorithm_of_comm_type(view) or view.get("context_parallel_algo")
    if not view.has_files and algorithm != "hybrid_cp_algo":
        if view.is_typed("ulysses_degree_in_cp"):
            view.notice("ulysses_degree_in_cp", "no effect, only --context-parallel-algo hybrid_cp_algo takes it")
        return {}
    return {"parallel_config.ulysses_degree_in_cp": value}


def distributed_backend(value, view):
    """`--distributed-backend`: Megatron's nccl and gloo are ignored (the device decides); our own names are taken."""
    if value in (None, "nccl", "gloo"):
        if view.is_typed("distributed_backend"):
            view.notice(
                "distributed_backend", f"{value} is not used: hccl on Ascend, shared memory on CPU (see --comm-backend)"
            )
        return {}
    return {"parallel_config.communication_backend": value}


def bf16(value, view):
    """`--bf16`: also accumulates gradients in fp32 unless --grad-reduce-in-bf16, as in Megatron."""
    settings = {"training_config.bf16": value}
    if value and not view.get("grad_reduce_in_bf16") and not view.has_files:
        settings["training_config.accumulate_allreduce_grads_in_fp32"] = True
    return settings


def check_for_nan(value, view):
    """Megatron's one switch for the checks of loss and gradients, which are two settings here."""
    del view
    return {"training_config.check_for_nan_in_loss": value, "training_config.check_for_nan_in_grad": value}


def logging_level(value, view):
    """`--logging-level`: the name of Python's number."""
    del view
    level = _LOG_LEVELS.get(value, value) if isinstance(value, int) else value
    return {"training_config.log_level": level} if level is not None else {}


def save(value, view):
    """`--save`: output_dir, and switches saving on (Megatron saves nothing without it)."""
    if value is None:
        return {}
    settings = {"training_config.output_dir": value}
    if not view.is_typed("save_enabled"):
        settings["training_config.save_enabled"] = True
    return settings


def load(value, view):
    """`--load`: load_checkpoint, and resumes from there unless --finetune, as Megatron."""
    if value is None:
        return {}
    settings = {"training_config.load_checkpoint": value}
    if not view.get("finetune") and not view.is_typed("resume_training"):
        settings["training_config.resume_training"] = True
    return settings


def ckpt_format(value, view):
    """`--ckpt-format`: Megatron's formats mean our own format, with a notice; ckpt and safetensors are upstream's."""
    if value in ("torch", "torch_dist", "torch_dcp", "zarr"):
        if view.is_typed("ckpt_format"):
            view.notice(
                "ckpt_format",
                f"{value} is Megatron's; checkpoints are written and read in our own format, and Megatron's cannot be "
                "converted yet",
            )
        return {}
    return {"training_config.ckpt_format": value} if value is not None else {}


def strictness(value, view):
    """`--dist-ckpt-strictness`: Megatron's handling of missing and unexpected tensors as `load_strict`."""
    if value is None or not view.is_typed("dist_ckpt_strictness"):
        return {}
    return {"training_config.load_strict": value in ("raise_all", "raise_unexpected", "assume_ok_unexpected")}


def slow_tokenizer(value, view):
    """`--tokenizer-not-use-fast`; given in a Namespace as False (MindSpeed-LLM stores it that way) or True."""
    if not view.is_typed("tokenizer_not_use_fast"):
        return {}
    del value
    return {"dataset_config.use_fast_tokenizer": False}


def beta(index):
    """Conversion of `--adam-beta1` (index 0) or `--adam-beta2` (1) to one entry of `betas`."""

    def convert(value, view):
        if value is None:
            return {}
        if view.is_typed("betas"):
            view.problem(f"adam_beta{index + 1}", f"contradicts --betas {view.get('betas')}; keep one")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            view.problem(f"adam_beta{index + 1}", "expects a number >= 0 and < 1")
            return {}
        try:
            betas = read_float_list(view.settings.value("optimizer_config.betas", [0.9, 0.999]))
        except ValueError:
            return {}  # the section reports it
        if len(betas) != 2:
            return {}  # a rule reports it
        betas[index] = value
        return {"optimizer_config.betas": betas}

    return convert


def moe_ffn_hidden_size(value, view):
    """`--moe-ffn-hidden-size`: dropped without experts, where Megatron fills in ffn_hidden_size."""
    if value is None or not view.get("num_experts"):
        return {}
    return {"moe_config.moe_ffn_hidden_size": value}


def load_balancing(value, view):
    """`--moe-router-load-balancing-type`: Megatron's and MindSpeed-LLM's names; a default is dropped without experts."""
    if not view.get("num_experts") and not view.is_typed("moe_router_load_balancing_type"):
        return {}
    if value == "noaux_tc":
        return {"moe_config.moe_router_load_balancing_type": "none", "moe_config.moe_router_enable_expert_bias": True}
    return {"moe_config.moe_router_load_balancing_type": "aux_loss" if value == "group_limited_greedy" else value}


def first_k_dense(value, view):
    """`--first-k-dense-replace`: -1 means "not set"."""
    del view
    return {} if value in (None, -1) else {"moe_config.first_k_dense_replace": value}


def moe_layer_freq(value, view):
    """`--moe-layer-freq`: a number n or a pattern such as "([0]*3+[1]*58)"; 1 and -1 are the default."""
    del view
    return {} if value in (None, 1, -1, "1", "-1") else {"moe_config.moe_layer_freq": value}


def window_size(value, view):
    """`--window-size LEFT,RIGHT`: sliding_window LEFT + 1, which counts the token itself; (-1, ...) is no window."""
    if value is None:
        return {}
    try:
        left, right = read_int_list(value)
    except ValueError:
        left, right = -2, 0
    if left < -1 or right not in (0, -1):
        view.problem("window_size", "expects LEFT,0: earlier tokens (-1: all), and no later ones")
        return {}
    return {} if left == -1 else {"model_config.sliding_window": left + 1}


# MindSpeed-LLM's (Megatron core's) name of a linear -> the name here
_LINEARS = {"linear_qkv": "qkv_proj", "linear_proj": "out_proj", "linear_fc1": "mapping", "linear_fc2": "projection"}


def lora_targets(value, view):
    """`--lora-target-modules`: names of linears, MindSpeed-LLM's too, as upstream's patterns; switches LoRA on."""
    names = value if isinstance(value, (list, tuple)) else [value]
    if not value:
        return {}  # the default of a foreign Namespace may be an empty list
    patterns = [rf".*\.{re.escape(_LINEARS.get(name, str(name)))}" for name in names]
    settings = {"lora_config.target_cells": [{"target_cells": patterns}]}
    if not view.is_typed("use_lora"):
        settings["lora_config.use_lora"] = True
    return settings
