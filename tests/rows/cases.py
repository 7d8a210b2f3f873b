"""What a run needs to show a row: the changed value, the settings beside it, and how the run is made."""

from tests.config.samples import _BF16, _FP16, _FULL, _PP2, _SHARDED, _TARGETS, _TP2, _WSD

M, T, D, OPT, P = ("model_config", "training_config", "dataset_config", "optimizer_config", "parallel_config")
E = "moe_config"
EVALUATED = {f"{T}.eval_interval": 1}
BOARD = {f"{T}.tensorboard_dir": "{folder}/board"}
SAVED = {f"{T}.save_enabled": True}
RESUMED = {
    f"{T}.load_checkpoint": "{saved}",
    f"{T}.resume_training": True,
    f"{T}.training_iters": 3,
    f"{M}.hidden_dropout": 0.25,
}
VPP = {**_PP2, f"{M}.num_layers": 4, f"{P}.num_layers_per_virtual_pipeline_stage": 1, f"{D}.micro_batch_num": 4}
OVERLAP = {f"{T}.wrap_with_ddp": True, f"{T}.overlap_grad_reduce": True}
BUCKETS = {**OVERLAP, f"{T}.bucket_size": 4000}
OVERFLOWING = {
    **_FP16,
    f"{T}.loss_scale_value": 2.0**20,
    f"{T}.loss_scale_factor": 16.0,
    f"{T}.loss_scale_window": 2,
    f"{T}.training_iters": 5,
}
GROWING = {**OVERFLOWING, f"{T}.loss_scale_value": 4.0}
SAMPLES = {f"{T}.training_iters": 0, f"{D}.train_samples": 12}
RAMP = {**SAMPLES, f"{D}.micro_batch_num": None, f"{D}.global_batch_size": 6, f"{D}.rampup_batch_size": [2, 2, 6]}
FLASH = {f"{M}.use_flash_attention": True}
DECAY = {f"{OPT}.lr_decay_style": "linear"}
GELU = {f"{M}.hidden_act": "gelu", f"{M}.add_bias_linear": True, f"{M}.mlp_has_bias": True}
ADAPTED = {"lora_config.use_lora": True, "lora_config.target_cells": _TARGETS}

EXPERTS = {f"{E}.num_experts": 8}
BIASED = {**EXPERTS, f"{E}.moe_router_score_function": "sigmoid", f"{E}.moe_router_bias_update_rate": 0.5}

FILES = {"files": True}
TEXT = {f"{D}.data_path": ["{data}/first"], f"{D}.split": "80,10,10"}
CHATS = {**TEXT, f"{D}.is_instruction_dataset": True}
SPLITS = {
    f"{D}.train_data_path": ["{data}/first"],
    f"{D}.valid_data_path": ["{data}/first"],
    f"{D}.test_data_path": ["{data}/first"],
    **EVALUATED,
}
LENGTHS = {**CHATS, f"{P}.variable_seq_lengths": True}

# rows that concern several data parallel ranks
ON_TWO_RANKS = {
    f"{T}.{name}"
    for name in (
        "overlap_grad_reduce",
        "average_in_collective",
        "bucket_size",
        "use_distributed_optimizer",
        "check_weight_hash_across_dp_replicas_interval",
        "grad_reduce_in_bf16",
    )
} | {f"{OPT}.overlap_param_gather"}

# path -> (value, settings beside it), and keywords of job.record behind them
CASES = {
    "lora_config.lora_load": ("{adapters}", ADAPTED),
    f"{M}.num_attention_heads": (2, {}),
    f"{M}.seq_length": (8, {}),
    f"{M}.fa_config.pre_tokens": (2, {**FLASH, f"{M}.fa_config.sparse_mode": 4, f"{M}.fa_config.next_tokens": 0}),
    f"{M}.fa_config.next_tokens": (3, {**FLASH, f"{M}.fa_config.sparse_mode": 4, f"{M}.fa_config.pre_tokens": 4}),
    f"{M}.fa_config.sparse_mode": (2, {**FLASH, f"{M}.fa_config.pre_tokens": 2, f"{M}.fa_config.next_tokens": 0}),
    f"{M}.fa_config.input_layout": ("BNSD", FLASH),
    f"{M}.window_attn_skip_freq": ([0, 1], {f"{M}.sliding_window": 4}),
    f"{M}.bias_gelu_fusion": (True, GELU),
    f"{M}.hidden_act": ("swiglu", {}),
    f"{M}.compute_dtype": ("bfloat16", {}),
    f"{M}.recompute_method": ("block", _FULL),
    f"{M}.recompute_num_layers": (1, {**_FULL, f"{M}.recompute_method": "block", f"{M}.recompute_num_layers": 2}),
    f"{M}.distribute_saved_activations": (True, {**_FULL, **_TP2}),
    f"{M}.apply_query_key_layer_scaling": (True, {**_FP16, f"{T}.loss_scale": 8.0}),
    f"{M}.fp16_lm_cross_entropy": (True, {**_FP16, f"{T}.loss_scale": 8.0}),
    f"{T}.fp16": (True, {f"{T}.loss_scale": 8.0}),
    f"{T}.load_checkpoint": ("{saved}", {}),
    f"{T}.pretrained_checkpoint": ("{saved}", {}),
    f"{T}.ckpt_step": (1, {f"{T}.load_checkpoint": "{saved}"}),
    f"{T}.no_load_rng": (True, RESUMED),
    f"{T}.no_load_optim": (True, RESUMED),
    f"{T}.resume_training": (False, RESUMED),
    f"{T}.new_dataset": (True, RESUMED),
    f"{T}.load_strict": (False, {f"{T}.load_checkpoint": "{saved}", f"{M}.position_embedding_type": "rope"}),
    f"{T}.exit_on_missing_checkpoint": (True, {f"{T}.resume_training": True}),
    f"{OPT}.use_checkpoint_opt_param_scheduler": (False, {**RESUMED, f"{OPT}.learning_rate": 0.02}, {"facet": "error"}),
    f"{OPT}.override_opt_param_scheduler": (
        True,
        {**RESUMED, f"{OPT}.learning_rate": 0.02, f"{OPT}.use_checkpoint_opt_param_scheduler": False},
        {"facet": "error"},
    ),
    f"{T}.check_for_nan_in_loss": (False, {}, {"nan": True}),
    f"{T}.check_for_nan_in_grad": (True, {**_FP16, f"{T}.wrap_with_ddp": True, f"{T}.loss_scale": 1e30}),
    f"{T}.check_weight_hash_across_dp_replicas_interval": (1, {}, {"diverge": True}),
    f"{T}.overlap_grad_reduce": (True, {f"{T}.wrap_with_ddp": True}),
    f"{P}.overlap_grad_reduce": (True, {f"{T}.wrap_with_ddp": True}),
    f"{T}.delay_grad_reduce": (True, {**BUCKETS, **_PP2, f"{M}.num_layers": 2, f"{P}.world_size": 4}, {"world": 4}),
    f"{T}.average_in_collective": (True, {f"{T}.wrap_with_ddp": True}),
    f"{T}.bucket_size": (4000, OVERLAP),
    f"{T}.device_target": ("Ascend", {}, {"facet": "error"}),
    f"{T}.log_level": ("warning", {}),
    f"{OPT}.overlap_param_gather": (True, {**_SHARDED, **OVERLAP}),
    f"{P}.recompute": ([1, 0], _PP2),
    f"{E}.moe_router_load_balancing_type": ("aux_loss", {**EXPERTS, f"{E}.moe_aux_loss_coeff": 0.5}),
    f"{E}.moe_aux_loss_coeff": (0.5, {**EXPERTS, f"{E}.moe_router_load_balancing_type": "aux_loss"}),
    f"{E}.moe_router_dtype": ("fp32", {**EXPERTS, **_BF16}),
    f"{E}.moe_router_num_groups": (2, {**EXPERTS, f"{E}.moe_router_num_groups": 4, f"{E}.moe_router_group_topk": 1}),
    f"{E}.moe_router_group_topk": (1, {**EXPERTS, f"{E}.moe_router_num_groups": 4, f"{E}.moe_router_group_topk": 2}),
    f"{E}.moe_router_enable_expert_bias": (True, BIASED),
    f"{E}.moe_router_bias_update_rate": (0.1, {**BIASED, f"{E}.moe_router_enable_expert_bias": True}),
    f"{E}.norm_topk_prob": (True, {**EXPERTS, f"{E}.moe_router_pre_softmax": True}),
    f"{E}.moe_token_drop_policy": ("position", {**EXPERTS, f"{E}.moe_expert_capacity_factor": 0.5}),
    f"{E}.moe_expert_capacity_factor": (0.5, EXPERTS),
    f"{E}.moe_per_layer_logging": (True, EXPERTS),
    f"{P}.select_recompute": ([1, 0], _PP2),
    f"{P}.overlap_p2p_comm": (False, VPP),
    f"{P}.microbatch_group_size_per_virtual_pipeline_stage": (4, VPP),
    f"{P}.variable_seq_lengths": (True, _PP2),
    f"{P}.recv_dtype": ("bfloat16", _PP2),
    f"{P}.deallocate_pipeline_outputs": (False, _PP2),
    f"{P}.zero_shard_size": (2, {f"{P}.zero_level": "z2", f"{P}.world_size": 4}, {"world": 4}),
    f"{T}.accumulate_allreduce_grads_in_fp32": (True, _BF16),
    f"{T}.enable_mem_align": (True, {f"{T}.wrap_with_ddp": True}),
    f"{T}.manual_gc_interval": (1, {f"{T}.manual_gc": True}),
    f"{T}.training_iters": (2, {}),
    f"{T}.epochs": (1, {f"{T}.training_iters": 0, f"{T}.epochs": 2}, {"count": 8, "loader": True}),
    f"{T}.log_interval": (2, {}),
    f"{T}.eval_interval": (2, {}),
    f"{T}.eval_iters": (2, EVALUATED),
    f"{T}.exit_interval": (2, {}),
    f"{T}.exit_duration_in_mins": (1, {}, {"minutes": 2}),
    f"{T}.exit_signal_handler": (False, SAVED, {"terminate": True}),
    f"{T}.skip_train": (True, EVALUATED),
    f"{T}.loss_scale": (8.0, OVERFLOWING),
    f"{T}.loss_scale_value": (2.0**21, OVERFLOWING),
    f"{T}.loss_scale_factor": (4.0, OVERFLOWING),
    f"{T}.loss_scale_window": (1, GROWING),
    f"{T}.min_loss_scale": (2.0**18, OVERFLOWING),
    f"{T}.hysteresis": (1, OVERFLOWING),
    f"{D}.rampup_batch_size": ([2, 2, 6], {**SAMPLES, f"{D}.micro_batch_num": None, f"{D}.global_batch_size": 6}),
    f"{D}.decrease_batch_size_if_needed": (True, {**RAMP, f"{D}.rampup_batch_size": [3, 3, 6]}, {"world": 2, "facet": "error"}),
    f"{D}.train_samples": (8, SAMPLES),
    f"{D}.micro_batch_num": (1, {}),
    f"{D}.batch_size": (2, {}),
    f"{D}.global_batch_size": (8, {f"{D}.micro_batch_num": None}),
    f"{D}.dataloader_type": ("cyclic", {}),
    f"{D}.drop_remainder": (False, {f"{T}.training_iters": 4}, {"count": 13, "world": 2}),
    f"{D}.data_path": (["{data}/second"], TEXT, FILES),
    f"{D}.train_data_path": (["{data}/second"], SPLITS, FILES),
    f"{D}.valid_data_path": (["{data}/second"], SPLITS, FILES),
    f"{D}.test_data_path": (["{data}/second"], SPLITS, FILES),
    f"{D}.split": ("50,25,25", TEXT, FILES),
    f"{D}.data_cache_path": ("{folder}/indices", TEXT, FILES),
    f"{D}.mock_data": (True, {}, {**FILES, "facet": "error"}),
    f"{D}.mmap_bin_files": (False, TEXT, FILES),
    f"{D}.create_attention_mask_in_dataloader": (
        False,
        {**TEXT, f"{D}.reset_attention_mask": True},
        {**FILES, "facet": "error"},
    ),
    f"{D}.is_instruction_dataset": (True, TEXT, FILES),
    f"{D}.full_shuffle_instruction_dataset": (True, CHATS, FILES),
    f"{D}.neat_pack": (True, CHATS, FILES),
    f"{D}.pad_to_multiple_of": (5, LENGTHS, {**FILES, "world": 1}),
    f"{D}.pad_token_id": (9, CHATS, FILES),
    f"{D}.eos_token_id": (5, {**TEXT, f"{D}.eod_mask_loss": True}, FILES),
    f"{T}.output_dir": ("{folder}/elsewhere", {}),
    f"{T}.save_enabled": (True, {}),
    f"{T}.save_interval": (1, SAVED),
    f"{T}.keep_checkpoint_max": (2, {**SAVED, f"{T}.save_interval": 1}),
    f"{T}.async_save": (True, SAVED, {"facet": "memory"}),
    f"{T}.ckpt_format": ("ckpt", SAVED),
    f"{T}.crc_check": (True, {**RESUMED, f"{T}.load_checkpoint": "{damaged}"}),
    f"{T}.non_persistent_save_interval": (1, SAVED),
    f"{T}.use_checkpoint_args": (True, {f"{T}.load_checkpoint": "{saved}", f"{M}.num_layers": 3}, {"facet": "error"}),
    f"{T}.no_save_optim": (True, SAVED),
    **{
        f"{OPT}.zero_config.{name}": (value, {f"{P}.zero_level": "z3", f"{D}.micro_batch_num": 2})
        for name, value in (
            ("param_resident", True),
            ("unit_modules", ["*.layers.0"]),
            ("allreduce_after_grad_accumulation", True),
            ("grad_allreduce_op", "sum"),
        )
    },
    f"{T}.no_save_rng": (True, SAVED),
    f"{T}.tensorboard_dir": ("{folder}/board", {}),
    f"{T}.timing_log_option": ("all", {f"{T}.timing_log_level": 1}),
    **{
        f"{T}.{name}": (value, {**BOARD, **EVALUATED})
        for name, value in (
            ("log_loss_scale_to_tensorboard", False),
            ("log_learning_rate_to_tensorboard", False),
            ("log_timers_to_tensorboard", True),
            ("log_batch_size_to_tensorboard", True),
            ("log_memory_to_tensorboard", True),
            ("log_validation_ppl_to_tensorboard", True),
            ("tensorboard_log_interval", 2),
            ("tensorboard_queue_size", 7),
        )
    },
    f"{T}.grad_reduce_in_bf16": (True, _BF16),
    f"{T}.calculate_per_token_loss": (True, {f"{D}.eod_mask_loss": True}),
    f"{OPT}.sgd_momentum": (0.25, {f"{OPT}.optimizer_type": "sgd"}),
    f"{OPT}.start_weight_decay": (
        0.0,
        {f"{OPT}.weight_decay_incr_style": "linear", f"{OPT}.start_weight_decay": 0.1, f"{OPT}.end_weight_decay": 0.5},
    ),
    f"{OPT}.end_weight_decay": (
        0.9,
        {f"{OPT}.weight_decay_incr_style": "linear", f"{OPT}.start_weight_decay": 0.1, f"{OPT}.end_weight_decay": 0.5},
    ),
    f"{OPT}.weight_decay_incr_style": (
        "cosine",
        {f"{OPT}.weight_decay_incr_style": "linear", f"{OPT}.start_weight_decay": 0.1, f"{OPT}.end_weight_decay": 0.5},
    ),
    f"{OPT}.no_weight_decay_params": (["word_embeddings.weight"], {f"{OPT}.weight_decay": 0.5}),
    f"{OPT}.clip_grad": (0.01, {}),
    f"{OPT}.clip_grad_type": ("GradClipByValue", {f"{OPT}.clip_grad": 0.01}),
    f"{T}.grad_clip_kwargs.grad_clip_type": (
        "GradClipByValue",
        {f"{OPT}.clip_grad": None, f"{T}.grad_clip_kwargs.clip_value": 0.01},
    ),
    f"{T}.grad_clip_kwargs.clip_value": (0.01, {f"{OPT}.clip_grad": None}),
    f"{OPT}.decoupled_min_lr": (0.005, {f"{OPT}.decoupled_lr": 0.02, **DECAY}),
    f"{OPT}.min_lr": (0.005, DECAY),
    f"{OPT}.lr_decay_style": ("cosine", {}),
    f"{OPT}.lr_decay_iters": (2, DECAY),
    f"{OPT}.lr_decay_samples": (8, {**SAMPLES, **DECAY}),
    f"{OPT}.lr_warmup_samples": (4, {**SAMPLES, **DECAY}),
    f"{OPT}.lr_warmup_iters": (1, DECAY),
    f"{OPT}.lr_warmup_init": (0.002, {f"{OPT}.lr_warmup_iters": 2}),
    f"{OPT}.lr_wsd_decay_style": ("exponential", _WSD),
    f"{OPT}.lr_wsd_decay_iters": (1, _WSD),
    f"{OPT}.lr_wsd_decay_samples": (4, {**SAMPLES, f"{OPT}.lr_decay_style": "WSD", f"{OPT}.lr_wsd_decay_samples": 8}),
}
