"""Bad input per row and per rule: the message names the key or flag, the value, and what is expected."""

import pytest

from mindspeed_ms.config import ConfigError, argument_parser, fit_to_world, init_configs_from_args, init_configs_from_dict
from mindspeed_ms.config.schema import SECTIONS
from tests.config.samples import _LATENT, BASE, ROWS, offenders, sample, with_settings

CHECKED = [row for row in ROWS if "anything" not in row.expects]
BOUNDED = [row for row in CHECKED if any(sign in row.expects for sign in (">", "<", "one of")) and "float32" not in row.expects]


def _targets(pattern):
    return {"lora_config.use_lora": True, "lora_config.target_cells": [{"target_cells": [pattern]}]}


def problems_of(raw):
    """The texts of all problems of a nested dict."""
    with pytest.raises(ConfigError) as caught:
        init_configs_from_dict(raw)
    return [str(problem) for problem in caught.value.problems]


def _wrong_type(row):
    wrong = {"deep": {"er": 1}} if "a mapping" not in row.expects else 7
    mine = "\n".join(text for text in problems_of(with_settings({row.path: wrong})) if row.path in text)
    return None if "expects" in mine and ("deep" in mine or "7" in mine) else mine or "no problem"


def _outside(expects):
    if "one of" in expects:
        return "no_such_word"
    if "<" in expects:
        return 12345678 if "integer" in expects else 12345.0
    return -5


def _out_of_range(row):
    wrong = _outside(row.expects)
    mine = [text for text in problems_of(with_settings({row.path: wrong})) if row.path in text]
    known = mine and repr(wrong) in mine[0] and row.expects.split(" or ")[0] in mine[0]
    return None if known else f"{wrong!r}: {mine}"


def _typo(row):
    section, *names = row.path.split(".")
    typed = names[-1] + "x"
    value, _ = sample(row)
    text = "\n".join(problems_of(with_settings({".".join((section, *names[:-1], typed)): value})))
    return None if typed in text and f"Did you mean {names[-1]!r}?" in text else text


@pytest.mark.parametrize(("check", "rows"), [(_wrong_type, CHECKED), (_out_of_range, BOUNDED), (_typo, ROWS)])
def test_bad_values_of_every_option_are_named(check, rows):
    assert len(rows) > 100
    assert not offenders(check, rows)


def test_the_issue_s_typo():
    (text,) = problems_of(with_settings({"parallel_config.tensor_model_paralel_size": 8}))
    assert "parallel_config.tensor_model_paralel_size = 8" in text
    assert "tensor_model_parallel_size" in text.split("Did you mean")[1]


def test_a_key_in_the_wrong_section_is_sent_home():
    (text,) = problems_of(with_settings({"model_config.micro_batch_num": 3}))
    assert "dataset_config.micro_batch_num" in text


def test_all_problems_come_together():
    texts = problems_of(
        with_settings(
            {"model_config.hidden_size": "big", "optimizer_config.lr": -1, "dataset_config.split": 3, "modle_config.x": 1}
        )
    )
    assert len(texts) == 4


P, M, T, D, OPT = "parallel_config", "model_config", "training_config", "dataset_config", "optimizer_config"
PP2, TP2 = {f"{P}.pipeline_model_parallel_size": 2}, {f"{P}.tensor_model_parallel_size": 2}
RAMP = {
    f"{T}.training_iters": 0,
    f"{D}.train_samples": 100,
    f"{D}.batch_size": 1,
    f"{D}.global_batch_size": 4,
    f"{D}.rampup_batch_size": [2, 1, 10],
}
LOSS_SCALE = {
    f"{T}.fp16": True,
    f"{M}.compute_dtype": "float16",
    f"{T}.loss_scale_value": 4,
    f"{T}.loss_scale_factor": 2,
    f"{T}.loss_scale_window": 100,
}
Z1 = {f"{P}.zero_level": "z1"}
WSD = {f"{OPT}.lr_decay_style": "WSD"}
E = "moe_config"
EXPERTS = {f"{E}.num_experts": 4}
GROUPS = {f"{E}.moe_router_num_groups": 2, f"{E}.moe_router_group_topk": 1}
SINKHORN = {f"{E}.moe_router_load_balancing_type": "sinkhorn"}
CAPACITY = {f"{E}.moe_expert_capacity_factor": 1.0}
ALLGATHER = {f"{E}.moe_token_dispatcher_type": "allgather"}
CP2 = {f"{P}.context_parallel_size": 2}
# (settings, key that is named, words that must be there)
SCALED = {f"{M}.position_embedding_type": "rope"}
RULES = [
    ({f"{P}.world_size": 6, f"{P}.tensor_model_parallel_size": 4}, f"{P}.world_size", "multiple of 4"),
    ({f"{P}.world_size": 8, f"{P}.data_parallel_size": 4}, f"{P}.data_parallel_size", "expects 8"),
    ({f"{P}.order": "tp-dp"}, f"{P}.order", "each of tp"),
    ({f"{M}.hidden_size": 66}, f"{M}.hidden_size", "multiple of 4"),
    ({f"{M}.multi_latent_attention": True}, f"{M}.multi_latent_attention", "needs position_embedding_type rope"),
    ({**_LATENT, f"{M}.attention_type": "self_attn"}, f"{M}.multi_latent_attention", "keep one"),
    ({**_LATENT, f"{M}.softmax_type": "learnable"}, f"{M}.softmax_type", "use vanilla"),
    (
        {**_LATENT, f"{M}.group_query_attention": True, f"{M}.num_query_groups": 2},
        f"{M}.multi_latent_attention",
        "leave groups out",
    ),
    ({**_LATENT, f"{M}.qk_pos_emb_head_dim": 5}, f"{M}.rotary_percent", "rotates 5 of 5"),
    ({f"{M}.group_query_attention": True, f"{M}.num_query_groups": 3}, f"{M}.num_attention_heads", "multiple of 3"),
    ({f"{M}.num_query_groups": 2}, f"{M}.num_query_groups", "group_query_attention"),
    ({f"{P}.tensor_model_parallel_size": 8}, f"{M}.num_attention_heads", "multiple of 8"),
    ({**TP2, f"{M}.group_query_attention": True, f"{M}.num_query_groups": 1}, f"{M}.num_query_groups", "multiple of 2"),
    ({**TP2, f"{M}.ffn_hidden_size": 129}, f"{M}.ffn_hidden_size", "multiple of 2"),
    ({**TP2, f"{M}.vocab_size": 127}, f"{M}.vocab_size", "multiple of 2"),
    ({f"{P}.sequence_parallel": True}, f"{P}.sequence_parallel", "above 1"),
    ({**TP2, f"{P}.sequence_parallel": True, f"{M}.seq_length": 31}, f"{M}.seq_length", "multiple of"),
    ({**CP2, f"{M}.seq_length": 31}, f"{M}.seq_length", "multiple of 2"),
    ({**CP2, f"{P}.context_parallel_algo": "megatron_cp_algo", f"{M}.seq_length": 30}, f"{M}.seq_length", "multiple of 4"),
    ({**CP2, f"{M}.seq_length": 31}, f"{M}.seq_length", "pad it to 32"),
    ({**CP2, f"{M}.attention_dropout": 0.1}, f"{M}.attention_dropout", "must be 0"),
    (
        {**CP2, f"{P}.context_parallel_algo": "adaptive_cp_algo"},
        f"{P}.context_parallel_algo",
        "megatron_cp_algo does for every",
    ),
    ({**CP2, f"{P}.context_parallel_algo": "flash_sp"}, f"{P}.context_parallel_algo", "use ulysses_cp_algo"),
    ({**CP2, f"{P}.context_parallel_algo": "ring"}, f"{P}.context_parallel_algo", "expects one of ulysses_cp_algo"),
    ({f"{P}.context_parallel_size": 8, f"{M}.seq_length": 64}, f"{M}.num_attention_heads", "ulysses"),
    (
        {f"{P}.context_parallel_size": 4, f"{P}.context_parallel_algo": "hybrid_cp_algo"},
        f"{P}.ulysses_degree_in_cp",
        "must be given",
    ),
    (
        {f"{P}.context_parallel_size": 4, f"{P}.context_parallel_algo": "hybrid_cp_algo", f"{P}.ulysses_degree_in_cp": 4},
        f"{P}.ulysses_degree_in_cp",
        "ring of at least 2",
    ),
    ({f"{P}.ulysses_degree_in_cp": 2}, f"{P}.ulysses_degree_in_cp", "hybrid_cp_algo only"),
    ({f"{P}.expert_model_parallel_size": 2}, f"{P}.expert_model_parallel_size", "needs experts"),
    ({**EXPERTS, f"{P}.expert_model_parallel_size": 3}, "moe_config.num_experts", "multiple of 3"),
    ({**EXPERTS, "moe_config.moe_router_topk": 5}, "moe_config.moe_router_topk", "number of experts"),
    ({**EXPERTS, **TP2}, f"{P}.sequence_parallel", "must be on"),
    ({**EXPERTS, f"{M}.num_experts": 8}, f"{M}.num_experts", "contradicts"),
    ({**EXPERTS, f"{E}.moe_router_topk": 1}, f"{E}.moe_router_pre_softmax", "must be on for top-1"),
    ({**EXPERTS, f"{E}.moe_router_num_groups": 2}, f"{E}.moe_router_num_groups", "needs moe_router_group_topk"),
    (
        {**EXPERTS, **GROUPS, f"{E}.moe_router_group_score_topk": 3},
        f"{E}.moe_router_group_score_topk",
        "must not be above the 2 experts of a group",
    ),
    ({**EXPERTS, **GROUPS, f"{E}.moe_router_num_groups": 3}, f"{E}.num_experts", "multiple of 3, the number of groups"),
    ({**EXPERTS, **GROUPS, f"{E}.moe_router_group_topk": 3}, f"{E}.moe_router_group_topk", "number of groups"),
    ({**EXPERTS, **GROUPS, f"{E}.moe_router_topk": 3}, f"{E}.moe_router_topk", "the 2 experts of the chosen groups"),
    (
        {f"{E}.num_experts": 8, f"{E}.moe_router_num_groups": 4, f"{E}.moe_router_group_topk": 3},
        f"{E}.moe_router_group_topk",
        "experts per token",
    ),
    ({**EXPERTS, f"{E}.moe_router_enable_expert_bias": True}, f"{E}.moe_router_enable_expert_bias", "sigmoid"),
    ({**EXPERTS, **SINKHORN, f"{E}.moe_aux_loss_coeff": 0.1}, f"{E}.moe_aux_loss_coeff", "does not work with sinkhorn"),
    ({**EXPERTS, **SINKHORN, **CAPACITY}, f"{E}.moe_expert_capacity_factor", "does not work with sinkhorn"),
    ({**EXPERTS, **SINKHORN, f"{E}.moe_router_score_function": "sigmoid"}, f"{E}.moe_router_score_function", "sinkhorn"),
    ({**EXPERTS, **CAPACITY, **ALLGATHER}, f"{E}.moe_expert_capacity_factor", "needs the dispatcher alltoall"),
    ({**EXPERTS, f"{E}.moe_expert_capacity_factor": 0.0}, f"{E}.moe_expert_capacity_factor", "above 0"),
    ({**EXPERTS, f"{E}.moe_pad_expert_input_to_capacity": True}, f"{E}.moe_pad_expert_input_to_capacity", "needs"),
    ({**EXPERTS, f"{E}.moe_token_dispatcher_type": "flex"}, f"{E}.moe_token_dispatcher_type", "DeepEP"),
    (
        {
            **EXPERTS,
            **TP2,
            f"{P}.sequence_parallel": True,
            f"{P}.expert_tensor_parallel_size": 1,
            f"{E}.moe_token_dispatcher_type": "alltoall_seq",
        },
        f"{E}.moe_token_dispatcher_type",
        "cut like the other layers",
    ),
    (
        {**EXPERTS, **TP2, f"{P}.sequence_parallel": True, f"{P}.expert_tensor_parallel_size": 2, f"{E}.moe_extended_tp": True},
        f"{E}.moe_extended_tp",
        "set that to 1",
    ),
    ({**EXPERTS, f"{E}.moe_shared_expert_gate": True}, f"{E}.moe_shared_expert_gate", "needs shared experts"),
    ({**EXPERTS, f"{E}.moe_shared_expert_overlap": True}, f"{E}.moe_shared_expert_overlap", "needs shared experts"),
    (
        {**EXPERTS, **ALLGATHER, f"{E}.moe_shared_expert_overlap": True, f"{E}.n_shared_experts": 1},
        f"{E}.moe_shared_expert_overlap",
        "needs the dispatcher alltoall",
    ),
    ({**PP2, f"{P}.num_layer_list": [4, 1]}, f"{P}.num_layer_list", "sum 5"),
    ({**PP2, f"{P}.num_layer_list": [4, 0]}, f"{P}.num_layer_list", "above 0"),
    ({**PP2, f"{P}.num_layer_list": [2, 1, 1]}, f"{P}.num_layer_list", "2 pipeline stages"),
    (
        {**PP2, f"{P}.num_layer_list": [[1, 1], [1, 1]], f"{P}.virtual_pipeline_model_parallel_size": 3},
        f"{P}.num_layer_list",
        "3 chunks",
    ),
    ({**PP2, f"{P}.num_layer_list": [[1, 1], [1]]}, f"{P}.num_layer_list", "one length"),
    ({f"{P}.virtual_pipeline_model_parallel_size": 2}, f"{P}.virtual_pipeline_model_parallel_size", "pipeline size above 1"),
    ({**PP2, f"{P}.num_layers_per_virtual_pipeline_stage": 3}, f"{M}.num_layers", "multiple of"),
    ({f"{P}.pipeline_model_parallel_size": 8}, f"{M}.num_layers", "less than one layer"),
    (
        {**PP2, f"{P}.num_layers_per_virtual_pipeline_stage": 1, f"{D}.micro_batch_num": 3},
        f"{D}.micro_batch_num",
        "multiple of pp = 2",
    ),
    (
        {**PP2, f"{P}.num_layers_per_virtual_pipeline_stage": 1, **RAMP, f"{P}.world_size": 2},
        f"{D}.rampup_batch_size",
        "gives 3 micro-batches",
    ),
    (
        {
            **PP2,
            f"{P}.num_layers_per_virtual_pipeline_stage": 1,
            **RAMP,
            f"{P}.world_size": 2,
            f"{P}.microbatch_group_size_per_virtual_pipeline_stage": 2,
            f"{D}.global_batch_size": 5,
        },
        f"{P}.microbatch_group_size_per_virtual_pipeline_stage",
        "leaves a last group of 1 of the 3 micro-batches",
    ),
    (
        {**PP2, f"{P}.num_layers_in_first_pipeline_stage": 4},
        f"{P}.num_layers_in_first_pipeline_stage",
        "leaves 0 layers for the other 1 stages",
    ),
    ({**PP2, f"{P}.num_layers_in_last_pipeline_stage": 5}, f"{P}.num_layers_in_last_pipeline_stage", "leaves -1 layers"),
    (
        {**PP2, f"{P}.num_layers_in_first_pipeline_stage": 1, f"{P}.num_layers_in_last_pipeline_stage": 2},
        f"{P}.num_layers_in_first_pipeline_stage",
        "no other stages",
    ),
    ({**RAMP, f"{P}.world_size": 2}, f"{D}.rampup_batch_size", "goes through 3"),
    ({**RAMP, f"{D}.train_samples": 1}, f"{D}.train_samples", "less than the first global batch, 2"),
    (
        {f"{T}.average_in_collective": True, f"{T}.calculate_per_token_loss": True},
        f"{T}.average_in_collective",
        "contradicts calculate_per_token_loss",
    ),
    ({**LOSS_SCALE, f"{T}.min_loss_scale": 8}, f"{T}.min_loss_scale", "above the loss scale at the start"),
    (
        {f"{T}.fp16": True, f"{M}.compute_dtype": "float16", f"{T}.min_loss_scale": 2.0**33},
        f"{T}.min_loss_scale",
        "above the loss scale at the start",
    ),
    (
        {f"{OPT}.start_weight_decay": 0.2, f"{OPT}.end_weight_decay": 0.1, f"{OPT}.weight_decay_incr_style": "linear"},
        f"{OPT}.start_weight_decay",
        "above the weight decay at the end",
    ),
    ({**WSD, f"{OPT}.lr_wsd_decay_iters": 5000}, f"{OPT}.lr_wsd_decay_iters", "must fit between"),
    ({**WSD, f"{OPT}.lr_wsd_decay_iters": 9, f"{OPT}.lr_warmup_iters": 2}, f"{OPT}.lr_wsd_decay_iters", "warm-up, 2,"),
    ({f"{P}.noop_layers": [4]}, f"{P}.noop_layers", "outside 0..3"),
    ({f"{P}.noop_layers": "1,1"}, f"{P}.noop_layers", "twice"),
    ({**PP2, f"{P}.recompute": [3, 0]}, f"{P}.recompute", "layers"),
    ({**PP2, f"{P}.recompute": [1, -1]}, f"{P}.recompute", "from 0"),
    ({**PP2, f"{P}.recompute": [1, 1], f"{M}.recompute_granularity": "selective"}, f"{P}.recompute", "keep one"),
    ({**PP2, f"{P}.select_comm_recompute": [1, 1]}, f"{P}.select_comm_recompute", "sequence parallelism"),
    ({f"{P}.world_size": 2, f"{D}.global_batch_size": 7}, f"{D}.global_batch_size", "nearest: 6 or 8"),
    ({f"{P}.world_size": 2, f"{D}.global_batch_size": 8, f"{D}.micro_batch_num": 2}, f"{D}.global_batch_size", "contradicts"),
    ({f"{D}.rampup_batch_size": [2, 2]}, f"{D}.rampup_batch_size", "three numbers"),
    ({f"{D}.train_samples": 100}, f"{T}.training_iters", "keep one"),
    ({f"{T}.fp16": True, f"{T}.bf16": True}, f"{T}.fp16", "keep one"),
    ({f"{T}.bf16": True, f"{M}.compute_dtype": "float16"}, f"{M}.compute_dtype", "bfloat16"),
    (
        {**LOSS_SCALE, f"{M}.fp16_lm_cross_entropy": True, f"{M}.loss_chunk_size": 8},
        f"{M}.loss_chunk_size",
        "takes the loss in float32",
    ),
    ({f"{M}.fp16_lm_cross_entropy": True}, f"{M}.fp16_lm_cross_entropy", "float16"),
    ({f"{M}.fp32_residual_connection": True}, f"{M}.fp32_residual_connection", "fp16 or bf16"),
    ({f"{T}.loss_scale_value": 1024}, f"{T}.loss_scale_value", "set together with"),
    (
        {f"{T}.bf16": True, f"{T}.grad_reduce_in_bf16": True, f"{T}.accumulate_allreduce_grads_in_fp32": True},
        f"{T}.grad_reduce_in_bf16",
        "contradicts",
    ),
    ({f"{T}.bucket_size": 10, f"{T}.wrap_with_ddp": False}, f"{T}.bucket_size", "wrap_with_ddp"),
    ({f"{T}.delay_grad_reduce": True}, f"{T}.delay_grad_reduce", "overlap_grad_reduce"),
    ({f"{OPT}.overlap_param_gather": True}, f"{OPT}.overlap_param_gather", "use_distributed_optimizer"),
    ({f"{P}.zero_shard_size": 2}, f"{P}.zero_shard_size", "zero_level"),
    ({f"{OPT}.zero_config": {"cpu_offload": True}}, f"{OPT}.zero_config.cpu_offload", "needs zero_level"),
    ({**Z1, f"{OPT}.zero_config": {"offload": True}}, f"{OPT}.zero_config.offload", "Did you mean 'cpu_offload'"),
    ({**Z1, f"{OPT}.zero_config": {"cpu_offload": "perhaps"}}, f"{OPT}.zero_config.cpu_offload", "expects a switch"),
    ({**Z1, f"{OPT}.zero_config": {"param_resident": True}}, f"{OPT}.zero_config.param_resident", "z3"),
    ({**Z1, f"{OPT}.zero_config": {"unit_modules": ["*.0"]}}, f"{OPT}.zero_config.unit_modules", "z3"),
    (
        {**Z1, f"{OPT}.zero_config": {"allreduce_after_grad_accumulation": True}},
        f"{OPT}.zero_config.allreduce_after_grad_accumulation",
        "z2 or z3",
    ),
    ({f"{T}.loss_func_kwargs": {"loss_func_tpe": "x"}}, f"{T}.loss_func_kwargs.loss_func_tpe", "Did you mean"),
    ({f"{T}.grad_clip_kwargs": {"clip_valeu": 1}}, f"{T}.grad_clip_kwargs.clip_valeu", "Did you mean 'clip_value'"),
    ({f"{T}.grad_clip_kwargs": {"grad_clip_type": "ClipGlobalNorm"}}, f"{T}.grad_clip_kwargs.clip_value", "is required"),
    ({f"{OPT}.clip_grad": {"clip_value": -1}}, f"{OPT}.clip_grad.clip_value", "a number >= 0"),
    ({f"{OPT}.clip_grad": {"clip_value": 1, "clip_type": "x"}}, f"{OPT}.clip_grad.clip_type", "Did you mean"),
    ({f"{T}.resume_training": True, f"{T}.output_dir": ""}, f"{T}.resume_training", "load_checkpoint"),
    ({f"{T}.resume_training": True, f"{T}.finetune": True}, f"{T}.resume_training", "contradicts finetune"),
    ({f"{T}.best_metric_comparison": "less"}, f"{T}.best_metric_comparison", "needs eval"),
    *(
        ({f"{D}.split": split}, f"{D}.split", "949,50,1")
        for split in ("a,b", "nan,1,1", "1,inf,1", "1,-1", "0,0,0", "1,1,1,1", "")
    ),
    ({f"{T}.prefix": "../x"}, f"{T}.prefix", "file name"),
    ({f"{T}.prefix": ""}, f"{T}.prefix", "not empty"),
    ({f"{D}.data_path": ["a"], f"{D}.train_data_path": ["b"]}, f"{D}.data_path", "keep one way"),
    ({f"{D}.data_path": ["0.0", "a", "1", "b"]}, f"{D}.data_path", "above 0"),
    ({f"{D}.data_path": ["nan", "a", "1", "b"]}, f"{D}.data_path", "finite"),
    ({f"{D}.data_path": ["1", "a", "inf", "b"]}, f"{D}.data_path", "finite"),
    ({f"{D}.data_path": ["0.5", "a", "b"]}, f"{D}.data_path", "pairs"),
    ({f"{T}.profile_step_start": 7}, f"{T}.profile_step_start", "not be after"),
    (
        {f"{T}.profile_dynamic_profiler_config_path": "nowhere.json"},
        f"{T}.profile_dynamic_profiler_config_path",
        "no existing file",
    ),
    ({f"{OPT}.min_lr": 1.0}, f"{OPT}.min_lr", "above the learning rate"),
    ({f"{OPT}.lr_warmup_iters": 10}, f"{OPT}.lr_warmup_iters", "before the decay"),
    ({f"{OPT}.lr_warmup_iters": 1, f"{OPT}.lr_warmup_fraction": 0.1}, f"{OPT}.lr_warmup_fraction", "keep one"),
    ({f"{OPT}.lr_decay_samples": 5}, f"{OPT}.lr_decay_samples", "another unit"),
    ({f"{OPT}.lr_decay_style": "WSD"}, f"{OPT}.lr_decay_style", "lr_wsd_decay_iters"),
    (
        {f"{OPT}.override_opt_param_scheduler": True, f"{OPT}.use_checkpoint_opt_param_scheduler": True},
        f"{OPT}.override_opt_param_scheduler",
        "contradicts",
    ),
    ({f"{OPT}.end_weight_decay": 0.3}, f"{OPT}.end_weight_decay", "constant"),
    ({f"{OPT}.betas": [0.9]}, f"{OPT}.betas", "two numbers"),
    ({f"{T}.grad_clip_kwargs": {"clip_value": 1.0}, f"{OPT}.clip_grad": 2.0}, f"{T}.grad_clip_kwargs", "keep one"),
    ({f"{M}.seq_length": 64, f"{M}.max_position_embeddings": 32}, f"{M}.seq_length", "max_position_embeddings"),
    ({f"{M}.rotary_interleaved": True}, f"{M}.rotary_interleaved", "rope"),
    ({f"{M}.position_embedding_type": "rope", f"{M}.rotary_percent": 0.01}, f"{M}.rotary_percent", "even number"),
    (
        {**SCALED, f"{M}.rope_scaling": {"high_freq_factor": 1.0}},
        f"{M}.rope_scaling.high_freq_factor",
        "must be above low_freq_factor",
    ),
    (
        {**SCALED, f"{M}.rope_scaling": {"type": "yarn", "beta_fast": 0.5}},
        f"{M}.rope_scaling.beta_fast",
        "must be above beta_slow",
    ),
    ({**SCALED, f"{M}.rope_scaling": {"type": "dynamic"}}, f"{M}.rope_scaling.type", "one of linear, llama3, yarn"),
    ({f"{M}.window_attn_skip_freq": [2]}, f"{M}.window_attn_skip_freq", "needs sliding_window"),
    *(
        ({f"{M}.sliding_window": 4, f"{M}.window_attn_skip_freq": wrong}, f"{M}.window_attn_skip_freq", "each of the 4 layers")
        for wrong in ([1], [1, 0, 1], [2, 0, 1, 1])
    ),
    ({f"{M}.sliding_window": 4, f"{M}.fa_config": {"pre_tokens": 3}}, f"{M}.fa_config.pre_tokens", "contradicts sliding"),
    ({f"{M}.gated_linear_unit": True}, f"{M}.gated_linear_unit", "swiglu"),
    ({f"{M}.attn_post_norm_scale": 0.5}, f"{M}.attn_post_norm_scale", "use_sandwich_norm"),
    ({f"{M}.fa_config": {"keep_prob": 0.5}}, f"{M}.fa_config.keep_prob", "attention_dropout"),
    ({f"{M}.init_method": "xavier"}, f"{M}.init_method", "expects normal"),
    ({f"{M}.recompute_granularity": "full"}, f"{M}.recompute_granularity", "recompute_method"),
    ({f"{M}.recompute_method": "block"}, f"{M}.recompute_method", "granularity"),
    ({"lora_config.use_lora": True}, "lora_config.target_cells", "exactly one"),
    ({"lora_config.lora_rank": 4}, "lora_config.lora_rank", "has no effect without use_lora"),
    (_targets(r".*\.qkv_porj"), "lora_config.target_cells", "matches no linear layer of the model; its linears end in"),
    (_targets(r".*\.qkv_porj"), "lora_config.target_cells", "near is 'language_model.encoder.layers.0.attention.qkv_proj'"),
    (_targets(r".*embeddings"), "lora_config.target_cells", "word_embeddings alone: embeddings and output layer get no"),
    (_targets(r".*_norm"), "lora_config.target_cells", "norm alone: it is no linear layer"),
    (
        {"moe_config.num_experts": 4, **_targets(r".*\.mapping")},
        "lora_config.target_cells",
        "experts get no low-rank adapters yet",
    ),
    ({f"{D}.is_pairwise_dataset": True}, f"{D}.is_pairwise_dataset", "needs a stage that trains on pairs: dpo, simpo, orm"),
    ({f"{T}.stage": "sft", f"{D}.is_pairwise_dataset": True}, f"{D}.is_pairwise_dataset", "stage sft trains on conversations"),
    ({f"{T}.stage": "dpo", f"{D}.is_instruction_dataset": True}, f"{D}.is_instruction_dataset", "trains on pairs of answers"),
    ({f"{T}.stage": "dpo", f"{D}.is_pairwise_dataset": False}, f"{D}.is_pairwise_dataset", "trains on pairs of answers"),
    ({f"{T}.stage": "orm", f"{T}.calculate_per_token_loss": True}, f"{T}.calculate_per_token_loss", "a mean over pairs"),
    ({f"{T}.stage": "simpo", f"{M}.label_smoothing": 0.1}, f"{M}.label_smoothing", "simpo_label_smoothing smooths"),
    ({f"{T}.stage": "prm", f"{M}.loss_chunk_size": 8}, f"{M}.loss_chunk_size", "stage prm looks at all logits"),
    (
        {f"{T}.stage": "rm", **_targets(r".*\.mapping"), "lora_config.lora_ckpt_filter": True},
        "lora_config.lora_ckpt_filter",
        "head of a reward model is trained too",
    ),
    ({f"{T}.stage": "dpo", f"{D}.neat_pack": True}, f"{D}.neat_pack", "packs conversations alone"),
    *(
        ({f"{T}.stage": "grpo", **settings}, key, words)
        for settings, key, words in (
            ({f"{P}.context_parallel_size": 2}, f"{P}.context_parallel_size", "cuts no sequences"),
            ({**TP2, f"{P}.sequence_parallel": True}, f"{P}.sequence_parallel", "cuts no sequences"),
            ({f"{P}.zero_level": "z3", f"{T}.wrap_with_ddp": True}, f"{P}.zero_level", "needs whole weights"),
            ({f"{P}.variable_seq_lengths": True}, f"{P}.variable_seq_lengths", "fills answers up to seq_length"),
            ({f"{T}.num_generations": 1}, f"{T}.num_generations", "expected at least 2"),
            ({f"{D}.global_batch_size": 8, f"{T}.rollout_batch_size": 12}, f"{T}.rollout_batch_size", "multiple of the global"),
            ({f"{D}.global_batch_size": 8, f"{T}.num_generations": 3}, f"{T}.num_generations", "divisor of the global batch"),
            ({f"{T}.reward_model": "a", f"{T}.reward_function": "b"}, f"{T}.reward_model", "both give the rewards"),
            ({f"{D}.dataloader_type": "cyclic"}, f"{D}.dataloader_type", "shuffles prompts by itself"),
            ({f"{T}.calculate_per_token_loss": True}, f"{T}.calculate_per_token_loss", "a mean over answers"),
            ({f"{T}.eval_interval": 2, f"{T}.eval_iters": 1}, f"{T}.eval_interval", "no validation data"),
            ({f"{T}.epochs": 2, f"{T}.training_iters": 0}, f"{T}.epochs", "give training_iters"),
            ({f"{D}.pack": True}, f"{D}.pack", "packs conversations alone"),
        )
    ),
    ({f"{M}.apply_layernorm_1p": True}, f"{M}.apply_layernorm_1p", "not available"),
]


def test_every_rule_names_its_setting_and_what_it_expects():
    from mindspeed_ms.config.checks import RULES as FUNCTIONS

    seen = set()

    def watch(function):
        def watched(context):
            found = list(function(context))
            if found:
                seen.add(function.__name__)
            return found

        return watched

    originals, wrong = list(FUNCTIONS), {}
    FUNCTIONS[:] = [watch(function) for function in originals]
    try:
        for number, (settings, key, words) in enumerate(RULES):
            texts = problems_of(with_settings(settings))
            if not any(text.startswith(key) and words in text for text in texts):
                wrong[f"{number} {key}"] = texts
    finally:
        FUNCTIONS[:] = originals
    assert not wrong
    # all but the last only tell (see test_trio, test_profiler, test_arguments); it is for sections made by constructors
    assert {function.__name__ for function in originals} - seen == {
        "layer_list_reading_is_clear",
        "profile_rows_have_effect",
        "group_size_has_an_effect",
        "settings_have_an_effect",
        "padding_is_used",
        "expert_numbers_agree",
    }


def test_sections_made_by_constructors_are_checked_at_the_start():
    from mindspeed_ms.config import AllConfig, MoEConfig, TransformerConfig

    model = TransformerConfig(128, 4, 4, 64, 128, seq_length=32, num_experts=8)
    with pytest.raises(ConfigError, match=r"model_config\.num_experts = 8: contradicts"):
        fit_to_world(AllConfig(model_config=model, moe_config=MoEConfig(num_experts=4)), 1)


def test_flags_are_named_for_command_lines():
    words = "--num-layers 4 --hidden-size 66 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128"
    words += " --min-lr 2 --lr 1"
    with pytest.raises(ConfigError) as caught:
        init_configs_from_args(argument_parser().parse_args(words.split()))
    text = str(caught.value)
    assert "command line: --hidden-size = 66" in text and "--min-lr = 2" in text


def test_problems_name_what_was_typed():
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128"
    words += " --adam-beta1 1.0 --ddp-bucket-size 0 --optimizer-type lamb --decoder-first-pipeline-num-layers=-1"
    with pytest.raises(ConfigError) as caught:
        init_configs_from_args(argument_parser().parse_args(words.split()))
    text = str(caught.value)
    for found in (
        "--adam-beta1 = 1.0:",
        "--ddp-bucket-size = 0:",
        "--optimizer-type = 'lamb':",
        "--decoder-first-pipeline-num-layers = -1:",
    ):
        assert f"command line: {found}" in text, text


def test_unknown_flags_end_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as caught:
        argument_parser().parse_args(["--tensor-model-paralel-size", "8"])
    assert caught.value.code == 2
    assert "--tensor-model-parallel-size" in capsys.readouterr().err


def test_foreign_namespaces_get_suggestions_too():
    import argparse

    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        init_configs_from_args(argparse.Namespace(tensor_model_paralel_size=8))


def test_the_world_is_checked_when_it_is_known():
    all_config = init_configs_from_dict(with_settings(TP2))
    with pytest.raises(ConfigError, match="multiple of 2"):
        fit_to_world(all_config, 3)
    fit_to_world(all_config, 4)
    assert (all_config.parallel_config.data_parallel_size, all_config.dataset_config.global_batch_size) == (2, 2)
    with pytest.raises(ConfigError, match="start 4"):
        fit_to_world(all_config, 8)


def test_constructors_and_assignments_are_checked():
    parallel = SECTIONS["parallel_config"](tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"parallel_config\.sequence_parallel"):
        parallel.sequence_parallel = "maybe"
    with pytest.raises(ConfigError, match="Did you mean 'sequence_parallel'"):
        SECTIONS["parallel_config"](sequence_paralel=True)
    with pytest.raises(AttributeError, match="Did you mean 'hidden_size'"):
        init_configs_from_dict(BASE).model_config.hiden_size  # noqa: B018
