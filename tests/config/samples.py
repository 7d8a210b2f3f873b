"""For every config path a value that is no default, and the settings that it needs beside it."""

import os

from mindspeed_ms.config.argument_table import rows_with_path
from mindspeed_ms.config.row import is_switch
from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.base import choices
from mindspeed_ms.config.sections.field import option_of

BASE = {
    "model_config": {
        "vocab_size": 128,
        "num_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "seq_length": 32,
    },
    "training_config": {"training_iters": 10},
}
_PP2 = {"parallel_config.pipeline_model_parallel_size": 2}
_TP2 = {"parallel_config.tensor_model_parallel_size": 2}
_SP = {**_TP2, "parallel_config.sequence_parallel": True}
_BF16 = {"training_config.bf16": True}
_FP16 = {"training_config.fp16": True}
_ROPE = {"model_config.position_embedding_type": "rope"}
# both with an effect on short sequences of narrow heads
_LLAMA3 = {**_ROPE, "model_config.rope_scaling.original_max_position_embeddings": 16}
_YARN = {**_ROPE, "model_config.rope_scaling.type": "yarn", "model_config.rope_scaling.original_max_position_embeddings": 1000}
_SANDWICH = {"model_config.use_sandwich_norm": True}
_FULL = {
    "model_config.recompute_granularity": "full",
    "model_config.recompute_method": "uniform",
    "model_config.recompute_num_layers": 1,
}
_EXPERTS = {"moe_config.num_experts": 4}
_GROUPS = {"moe_config.moe_router_num_groups": 4, "moe_config.moe_router_group_topk": 2}
_ALLTOALL = {"moe_config.moe_token_dispatcher_type": "alltoall"}
_SHARDED = {"training_config.use_distributed_optimizer": True}
_ZERO = {"parallel_config.zero_level": "z2"}
_WSD = {"optimizer_config.lr_decay_style": "WSD", "optimizer_config.lr_wsd_decay_iters": 2}
_SCALE = {
    "training_config.loss_scale_value": 1024.0,
    "training_config.loss_scale_factor": 2.0,
    "training_config.loss_scale_window": 100,
}
_SAMPLES = {"training_config.training_iters": 0, "dataset_config.train_samples": 1000}
_BEST = {"training_config.best_metric_comparison": "less", "training_config.eval_metric": "loss"}
_LINEAR_DECAY = {"optimizer_config.weight_decay_incr_style": "linear", "optimizer_config.weight_decay": 0.2}
_TARGETS = [{"target_cells": [r".*\.qkv_proj"]}]

_CLAMPED = {"model_config.hidden_act": "clamped_swiglu"}
_LATENT = {
    **_ROPE,
    "model_config.multi_latent_attention": True,
    "model_config.kv_lora_rank": 16,
    "model_config.qk_head_dim": 8,
    "model_config.qk_pos_emb_head_dim": 4,
    "model_config.v_head_dim": 8,
}

# path -> value, or (value, settings beside it; the path itself is there if it cannot be left out)
SPECIAL = {
    "model_config.vocab_size": 256,
    "model_config.num_layers": 6,
    "model_config.num_attention_heads": 8,
    "model_config.hidden_size": 32,
    "model_config.ffn_hidden_size": 256,
    "model_config.seq_length": 64,
    "model_config.max_position_embeddings": 64,
    "model_config.attention_type": ("self_attn", {}),
    "model_config.group_query_attention": (True, {"model_config.num_query_groups": 4}),
    "model_config.num_query_groups": (2, {"model_config.group_query_attention": True, "model_config.num_query_groups": 4}),
    "model_config.kv_channels": 32,
    "model_config.position_embedding_type": "rope",
    "model_config.add_position_embedding": (False, _ROPE),
    "model_config.use_rotary_position_embeddings": (True, _ROPE),
    "model_config.mtp_num_layers": (1, _ROPE),
    "model_config.mtp_loss_scaling_factor": (0.5, {**_ROPE, "model_config.mtp_num_layers": 1}),
    "model_config.rotary_base": (500.0, _ROPE),
    "model_config.rotary_percent": (0.5, _ROPE),
    "model_config.rotary_interleaved": (True, _ROPE),
    "model_config.rotary_seq_len_interpolation_factor": (2.0, _ROPE),
    "model_config.apply_rope_fusion": (True, _ROPE),
    "model_config.rope_scaling.high_freq_factor": (8.0, _LLAMA3),
    "model_config.rope_scaling.beta_fast": (2.0, _YARN),
    "model_config.rope_scaling.beta_slow": (16.0, _YARN),
    **{
        f"model_config.rope_scaling.{name}": (value, _YARN)
        for name, value in (("attention_factor", 0.25), ("mscale", 0.25), ("mscale_all_dim", 0.25), ("truncate", False))
    },
    "model_config.multi_latent_attention": (True, _ROPE),
    **{
        f"model_config.{name}": (value, {**_LATENT, f"model_config.{name}": other})
        for name, value, other in (
            ("q_lora_rank", 16, None),
            ("kv_lora_rank", 24, 16),
            ("qk_head_dim", 12, 8),
            ("qk_pos_emb_head_dim", 6, 4),
            ("v_head_dim", 12, 8),
        )
    },
    "model_config.swiglu_limit": (0.01, _CLAMPED),
    "model_config.swiglu_alpha": (1.0, _CLAMPED),
    "model_config.qk_layernorm_epsilon": (0.5, {"model_config.qk_layernorm": True}),
    "model_config.softmax_type": ("learnable", {}),
    "model_config.window_attn_skip_freq": ([1, 0, 1, 0], {"model_config.sliding_window": 4}),
    "model_config.hidden_act": "swiglu",
    "model_config.gated_linear_unit": (True, {"model_config.hidden_act": "swiglu"}),
    "model_config.apply_swiglu_fusion": (True, {"model_config.hidden_act": "swiglu"}),
    "model_config.attn_post_norm_scale": (0.5, _SANDWICH),
    "model_config.ffn_post_norm_scale": (0.5, _SANDWICH),
    "model_config.residual_connection_dtype": ("float32", _BF16),
    "model_config.fp32_residual_connection": (True, _BF16),
    "training_config.grad_reduce_in_bf16": (True, _BF16),
    "model_config.init_method": "zeros",
    "model_config.bias_init": 0.5,
    "model_config.params_dtype": ("float32", _BF16),
    "model_config.softmax_compute_dtype": ("bfloat16", _BF16),
    "model_config.attention_softmax_in_fp32": (False, _BF16),
    "model_config.fp16_lm_cross_entropy": (True, _FP16),
    "model_config.loss_chunk_size": 64,
    "model_config.mlp_chunk_size": 64,
    "model_config.transformer_impl": "local",
    "model_config.recompute_granularity": "selective",
    "model_config.recompute_method": ("block", _FULL),
    "model_config.recompute_num_layers": (2, _FULL),
    "model_config.distribute_saved_activations": (True, {**_FULL, **_TP2}),
    "model_config.num_experts": (8, {}),
    "model_config.fa_config.keep_prob": (0.75, {"model_config.attention_dropout": 0.25}),
    "training_config.training_iters": 20,
    "training_config.best_metric_comparison": (
        "less",
        {"training_config.eval_metric": "loss", "training_config.eval_interval": 5},
    ),
    "training_config.eval_metric": ("accuracy", {**_BEST, "training_config.eval_interval": 5}),
    "training_config.loss_scale_value": (512.0, _SCALE),
    "training_config.loss_scale_factor": (4.0, _SCALE),
    "training_config.loss_scale_window": (50, _SCALE),
    "training_config.loss_func_kwargs.loss_func_type": "VocabParallelCrossEntropy",
    "training_config.grad_clip_kwargs.grad_clip_type": (
        "GradClipByValue",
        {"training_config.grad_clip_kwargs.clip_value": 1.0},
    ),
    "training_config.grad_clip_kwargs.clip_value": 0.5,
    "training_config.overlap_grad_reduce": (True, {"training_config.wrap_with_ddp": True}),
    "training_config.delay_grad_reduce": (True, {"training_config.overlap_grad_reduce": True}),
    "training_config.empty_unused_memory_level": 2,
    "training_config.exit_on_missing_checkpoint": (True, {"training_config.load_checkpoint": "weights"}),
    "training_config.use_checkpoint_args": (True, {"training_config.resume_training": True}),
    "training_config.profile_step_start": 2,
    "training_config.profile_ranks": [0, 3],
    "training_config.profile_aicore_metrics": 3,
    "training_config.profile_dynamic_profiler_config_path": os.path.dirname(__file__),
    "training_config.profile_framework": "all",
    "dataset_config.train_samples": (500, {"training_config.training_iters": 0}),
    "dataset_config.global_batch_size": 8,
    "dataset_config.rampup_batch_size": ([2, 2, 100], {**_SAMPLES, "dataset_config.global_batch_size": 8}),
    "dataset_config.split": "90,5,5",
    "dataset_config.vocab_size": (100, {}),
    "dataset_config.data_path": ["0.3", "first", "0.7", "second"],
    "optimizer_config.optimizer_type": "sgd",
    "optimizer_config.betas": [0.8, 0.9],
    "optimizer_config.min_lr": 1e-4,
    "optimizer_config.lr_decay_style": "cosine",
    "optimizer_config.lr_decay_iters": 8,
    "optimizer_config.lr_decay_samples": (800, _SAMPLES),
    "optimizer_config.lr_warmup_iters": 2,
    "optimizer_config.lr_warmup_samples": (20, _SAMPLES),
    "optimizer_config.lr_warmup_fraction": 0.25,
    "optimizer_config.lr_warmup_init": 1e-5,
    "optimizer_config.decoupled_min_lr": 1e-5,
    "optimizer_config.lr_wsd_decay_style": ("cosine", _WSD),
    "optimizer_config.lr_wsd_decay_iters": (3, _WSD),
    "optimizer_config.lr_wsd_decay_samples": (
        30,
        {**_SAMPLES, "optimizer_config.lr_decay_style": "WSD", "optimizer_config.lr_wsd_decay_samples": 20},
    ),
    "optimizer_config.use_checkpoint_opt_param_scheduler": False,
    "optimizer_config.override_opt_param_scheduler": True,
    "optimizer_config.weight_decay_incr_style": (
        "linear",
        {"optimizer_config.end_weight_decay": 0.1, "optimizer_config.weight_decay_incr_style": "cosine"},
    ),
    "optimizer_config.start_weight_decay": (0.05, _LINEAR_DECAY),
    "optimizer_config.end_weight_decay": (0.15, _LINEAR_DECAY),
    "optimizer_config.overlap_param_gather": (True, _SHARDED),
    "optimizer_config.overlap_param_gather_with_optimizer_step": (
        True,
        {**_SHARDED, "optimizer_config.overlap_param_gather": True},
    ),
    **{
        f"optimizer_config.zero_config.{name}": (value, {"parallel_config.zero_level": "z3"})
        for name, value in {
            "param_resident": True,
            "allreduce_after_grad_accumulation": True,
            "unit_modules": ["*.layers.0"],
            "grad_allreduce_op": "sum",
            "opt_parallel_group": "dp",
            "cpu_offload": True,
        }.items()
    },
    "parallel_config.tensor_model_parallel_size": 2,
    "parallel_config.pipeline_model_parallel_size": 2,
    "parallel_config.context_parallel_size": (2, {"model_config.attention_dropout": 0.0}),
    "parallel_config.context_parallel_algo": (
        "megatron_cp_algo",
        {"parallel_config.context_parallel_size": 2, "model_config.attention_dropout": 0.0},
    ),
    "parallel_config.ulysses_degree_in_cp": (
        2,
        {
            "parallel_config.context_parallel_size": 8,
            "parallel_config.context_parallel_algo": "hybrid_cp_algo",
            "parallel_config.ulysses_degree_in_cp": 4,
            "model_config.attention_dropout": 0.0,
        },
    ),
    "parallel_config.expert_model_parallel_size": (2, _EXPERTS),
    "parallel_config.expert_tensor_parallel_size": (1, {**_EXPERTS, **_SP}),
    "parallel_config.virtual_pipeline_model_parallel_size": (2, _PP2),
    "parallel_config.num_layers_per_virtual_pipeline_stage": (1, _PP2),
    "parallel_config.num_layer_list": ([3, 1], _PP2),
    "parallel_config.num_layer_list_order": (
        "vpp_pp",
        {**_PP2, "model_config.num_layers": 6, "parallel_config.num_layer_list": [[2, 2], [1, 1]]},
    ),
    "parallel_config.noop_layers": [3],
    "parallel_config.num_layers_in_first_pipeline_stage": (3, _PP2),
    "parallel_config.num_layers_in_last_pipeline_stage": (3, _PP2),
    "parallel_config.account_for_embedding_in_pipeline_split": (True, {**_PP2, "model_config.num_layers": 5}),
    "parallel_config.account_for_loss_in_pipeline_split": (True, {**_PP2, "model_config.num_layers": 5}),
    "parallel_config.standalone_embedding_stage": (True, {"parallel_config.pipeline_model_parallel_size": 3}),
    "parallel_config.sequence_parallel": (True, _TP2),
    "parallel_config.recompute": ([1, 0], _PP2),
    "parallel_config.select_recompute": ([1, 0], _PP2),
    "parallel_config.select_comm_recompute": ([1, 0], {**_PP2, **_SP}),
    "parallel_config.zero_level": "z2",
    "parallel_config.zero_shard_size": (2, _ZERO),
    "parallel_config.microbatch_group_size_per_virtual_pipeline_stage": (
        4,
        {**_PP2, "parallel_config.num_layers_per_virtual_pipeline_stage": 1},
    ),
    "parallel_config.order": ("tp-cp-ep-pp-dp", _PP2),
    "parallel_config.world_size": 4,
    "parallel_config.data_parallel_size": (4, {"parallel_config.world_size": 4}),
    "moe_config.num_experts": 4,
    "moe_config.moe_pad_expert_input_to_capacity": (
        True,
        {**_EXPERTS, **_ALLTOALL, "moe_config.moe_expert_capacity_factor": 1.5},
    ),
    "moe_config.moe_grouped_gemm": (True, {**_EXPERTS, "model_config.add_bias_linear": False}),
    "moe_config.moe_layer_freq": ([1, 0, 1, 0], _EXPERTS),
    "moe_config.moe_token_dispatcher_type": ("allgather", _EXPERTS),
    "moe_config.moe_router_topk": (3, _EXPERTS),
    "moe_config.moe_extended_tp": (True, {**_EXPERTS, **_TP2, "parallel_config.sequence_parallel": True}),
    "moe_config.moe_router_num_groups": (2, {**_EXPERTS, **_GROUPS}),
    "moe_config.moe_router_group_topk": (1, {**_EXPERTS, **_GROUPS, "moe_config.moe_router_num_groups": 2}),
    "moe_config.moe_router_group_score_topk": (
        1,
        {**_EXPERTS, "moe_config.moe_router_num_groups": 2, "moe_config.moe_router_group_topk": 1},
    ),
    "moe_config.moe_router_enable_expert_bias": (True, {**_EXPERTS, "moe_config.moe_router_score_function": "sigmoid"}),
    "moe_config.moe_shared_expert_gate": (True, {**_EXPERTS, "moe_config.n_shared_experts": 1}),
    "moe_config.moe_shared_expert_overlap": (True, {**_EXPERTS, **_ALLTOALL, "moe_config.n_shared_experts": 1}),
    "moe_config.moe_expert_capacity_factor": (0.25, {**_EXPERTS, **_ALLTOALL}),
    **{
        f"lora_config.{name}": (value, {"lora_config.use_lora": True, "lora_config.target_cells": _TARGETS})
        for name, value in (
            ("lora_rank", 9),
            ("lora_alpha", 33),
            ("lora_dropout", 0.5),
            ("use_rslora", True),
            ("lora_plus_ratio", 16.0),
            ("lora_load", "adapter"),
            ("lora_ckpt_filter", True),
        )
    },
    "lora_config.use_lora": (True, {"lora_config.use_lora": False, "lora_config.target_cells": _TARGETS}),
    "lora_config.target_cells": (
        _TARGETS,
        {"lora_config.use_lora": True, "lora_config.target_cells": [{"target_cells": [r".*\.mapping"]}]},
    ),
    "dataset_config.dataloader_type": "cyclic",
    "dataset_config.is_pairwise_dataset": (True, {"training_config.stage": "dpo"}),
    "dataset_config.enable_thinking": True,
    "lora_config.lora_module": {"layer": "adapter"},
}


def sample(row):
    """(value, settings beside it) for a row: any value that differs from the guide's default and breaks no rule."""
    if row.path in SPECIAL:
        entry = SPECIAL[row.path]
        value, beside = entry if isinstance(entry, tuple) else (entry, {})
        return value, beside
    beside = _EXPERTS if row.section == "moe_config" else _LLAMA3 if "rope_scaling" in row.path else {}
    return _other_than(row.guide_default, row), beside


def _other_than(default, row):
    if is_switch(row.info):
        return not default
    if choices(row.info):
        return next(choice for choice in choices(row.info) if choice != default)
    expects = row.expects
    if "float32" in expects:
        return "bfloat16"
    if "list of words" in expects:
        return ["one", "two"]
    if "a number" in expects:
        return 0.25 if default is None or default != 0.25 else 0.5
    if "an integer" in expects:
        return (default or 0) + 1
    if "a string" in expects:
        return "something"
    if "a mapping" in expects:
        return {"key": 1}
    raise AssertionError(f"no sample for {row.path}, which takes {expects}")


def with_settings(*groups):
    """BASE as a nested dict with settings {path: value} laid over it."""
    result = {name: dict(section) for name, section in BASE.items()}
    for group in groups:
        for path, value in group.items():
            section, field, *rest = path.split(".")
            target = result.setdefault(section, {})
            if rest:
                target.setdefault(field, {})[rest[0]] = value
            else:
                target[field] = value
    return result


def offenders(check, rows):
    """{path: what is wrong} of the rows about which `check` says something."""
    return {row.path: text for row in rows if (text := check(row))}


def value_at(all_config, path):
    """The value at a config path of an AllConfig."""
    value = all_config
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def later_paths():
    """Config paths that ask for a feature which does not run yet, and beginnings of the paths that belong to it."""
    options = [(path, option_of(info)) for path, info in all_fields()]
    return tuple(part for path, option in options if option.later for part in (path, *option.later_parts))


ROWS = rows_with_path()
