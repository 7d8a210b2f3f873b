"""Megatron and MindSpeed flags without a place in the configuration: ignored, or refused, each with the reason.

A group is (reason, Chinese reason, {name: default}); the default tells the form of the flag: False ``--name``, True
``--no-name``, a list several values, anything else one value.
"""

from mindspeed_ms.config.rows.row import IGNORED, LIST, OFF, ON, REFUSED, VALUE, Row, flag_of

# option strings that do not follow from the name
_FLAGS = {
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "bert_binary_head": "--bert-no-binary-head",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "use_dist_ckpt_deprecated": "--use-dist-ckpt",
    "dist_ckpt_format_deprecated": "--dist-ckpt-format",
    "ckpt_fully_parallel_save_deprecated": "--ckpt-fully-parallel-save",
    "enable_gloo_process_groups": "--disable-gloo-process-groups",
    "enable_one_logger": "--no-one-logger",
    "inference_max_batch_size": "--inference-max-requests",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "perform_initialization": "--no-initialization",
    "retro_verify_neighbor_count": "--retro-no-verify-neighbor-count",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_split_ag": "--disable-tp-comm-split-ag",
    "tp_comm_split_rs": "--disable-tp-comm-split-rs",
    "skip_bias_add": "--skip-bias-add",
    "input_jitter": "--input-jitter",
}
# further names in a Namespace
_NAMES = {"deprecated_use_mcore_models": ("use_mcore_models",), "use_dist_ckpt_deprecated": ("use_dist_ckpt",)}

_IGNORED = (
    ("there is one model tree here, and it gives the numbers of both of Megatron's", "本框架只有一套模型，数值与Megatron的两套一致", {
        "deprecated_use_mcore_models": False, "use_legacy_models": False, "spec": [], "ai_framework": "mindspore"}),
    ("CUDA, NCCL and PyTorch settings have nothing to act on", "CUDA、NCCL和PyTorch的设置在此没有作用对象", {
        "async_tensor_model_parallel_allreduce": True, "barrier_with_L1_time": True, "cp_comm_type": ["p2p"],
        "ddp_pad_buckets_for_high_nccl_busbw": False, "disable_bf16_reduced_precision_matmul": False,
        "enable_cuda_graph": False, "cuda_graph_scope": "full", "cuda_graph_warmup_steps": 3, "external_cuda_graph": False,
        "enable_gloo_process_groups": True, "nccl_communicator_config_path": None, "nccl_ub": False,
        "pipeline_model_parallel_comm_backend": None, "pin_cpu_grads": True, "pin_cpu_params": True,
        "scatter_gather_tensors_in_pipeline": True, "te_rng_tracker": False, "inference_rng_tracker": False,
        "tp_comm_bootstrap_backend": "nccl", "tp_comm_bulk_dgrad": True, "tp_comm_bulk_wgrad": True,
        "tp_comm_overlap_ag": True, "tp_comm_overlap_cfg": None, "tp_comm_overlap_rs": True, "tp_comm_overlap_rs_dgrad": False,
        "tp_comm_split_ag": True, "tp_comm_split_rs": True, "train_sync_interval": None, "use_pytorch_profiler": False,
        "use_ring_exchange_p2p": False, "use_torch_optimizer_for_cpu_offload": False, "jit_compile": False,
        "use_ascend_mc2": False, "use_mc2": False, "use_ascend_coc": False, "coc_mode": -1, "coc_parallel_num": 1,
        "coc_fused_kernel": False, "hccl_group_buffer": None, "hccl_group_buffer_adaptive": False}),
    ("the launcher (msrun) and the environment decide that", "由启动器（msrun）和环境变量决定", {
        "local_rank": 0, "nproc_per_node": None, "nnodes": None, "node_rank": None, "master_addr": None, "master_port": None,
        "rdzv_backend": None, "rdzv_endpoint": None, "max_restarts": None, "lazy_mpu_init": None,
        "no_shared_storage": False}),
    ("it changes speed or memory of a kernel, not its numbers", "只影响算子的速度或内存，不影响数值", {
        "no_persist_layer_norm": False, "cross_entropy_loss_fusion": False, "cross_entropy_fusion_impl": "native",
        "attention_backend": "auto", "gemm_gradient_accumulation_fusion": False, "gradient_reduce_div_fusion": True,
        "overlap_p2p_comm_warmup_flush": False, "align_grad_reduce": True, "align_param_gather": False,
        "defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0, "use_fused_ring_attention_update": False,
        "use_fused_mlp": False, "mla_fa_without_pad": False, "moe_alltoall_overlap_comm": False,
        "moe_allgather_overlap_comm": False, "moe_use_legacy_grouped_gemm": False, "moe_enable_deepep": False,
        "moe_zero_memory": "disable", "moe_zero_memory_num_layers": None, "enable_token_rearrange_opt": False,
        "swap_attention": False, "swap_modules": None, "swap_optimizer_times": 16, "use_cp_send_recv_overlap": False,
        "attention_mask_on_cpu": False, "output_layer_slice_num": 1, "lora_fusion": False,
        "kv_head_repeat_before_uly_alltoall": False, "mtp_mem_efficient_logits": False, "overlap_cpu_optimizer_d2h_h2d": False,
        "optimizer_offload_fraction": 1.0, "ddp_num_buckets": None, "suggested_communication_unit_size": None}),
    ("our checkpoints are sharded, written in parallel and load in any layout", "本框架的检查点分片并行写入，可在任意布局加载", {
        "use_dist_ckpt_deprecated": False, "dist_ckpt_format_deprecated": None,
        "ckpt_fully_parallel_save_deprecated": False, "ckpt_fully_parallel_save": True, "ckpt_fully_parallel_load": False,
        "ckpt_assume_constant_structure": False, "auto_detect_ckpt_format": False, "use_persistent_ckpt_worker": False,
        "use_mp_args_from_checkpoint_args": False, "use_tokenizer_model_from_checkpoint_args": True,
        "perform_initialization": True, "init_model_with_meta_device": False, "enable_hf2mg_convert": False,
        "model_type_hf": None, "ckpt_convert_update_legacy_dist_opt_format": False}),
    ("logging here goes to the log, metrics.jsonl and TensorBoard", "日志写入日志文件、metrics.jsonl和TensorBoard", {
        "wandb_project": "", "wandb_exp_name": "", "wandb_save_dir": "", "enable_one_logger": True, "one_logger_project": "megatron-lm",
        "one_logger_run_name": None, "one_logger_async": False, "app_tag_run_name": None, "app_tag_run_version": "0.0.0",
        "log_progress": False, "log_straggler": False, "disable_straggler_on_startup": False, "straggler_ctrlr_port": 65535,
        "straggler_minmax_count": 1, "timing_log_level": 0, "timing_log_option": "minmax", "log_world_size_to_tensorboard": False,
        "config_logger_dir": "", "run_workload_inspector_server": False, "memory_snapshot_path": "snapshot.pickle",
        "record_memory_history": False, "profile_ranks": [0], "profile_record_shapes": False, "profile_with_cpu": False,
        "profile_export_type": "text"}),
    ("it belongs to NVIDIA's cluster tools", "属于NVIDIA的集群工具", {
        "adlr_autoresume": False, "adlr_autoresume_interval": 1000, "enable_ft_package": False, "calc_ft_timeouts": False,
        "rerun_mode": "disabled", "error_injection_rate": 0, "error_injection_type": "transient_error",
        "result_rejected_tracker_filename": None, "test_mode": False, "replication": False, "replication_jump": None,
        "replication_factor": 2, "non_persistent_local_ckpt_algo": "fully_parallel"}),
    ("it describes the data for preprocessing or post-training; pretraining from prepared data does not read it",
     "用于数据预处理或后训练，预训练不读取", {
         "handler_name": "", "prompt_type": None, "prompt_type_path": None, "tokenizer_padding_side": "right",
         "tokenizer_kwargs": [], "pad_to_multiple_of": 8, "num_dataset_builder_threads": 1, "s3_cache_path": None,
         "mask_prob": 0.15, "short_seq_prob": 0.1, "sample_rate": 1.0, "manual_gc_eval": True,
         "return_document_ids": False, "history_turns": 3}),
    ("inference settings have no effect on training", "推理设置对训练没有作用", {
        "inference_batch_times_seqlen_threshold": -1, "max_tokens_to_oom": 12000, "flash_decode": False,
        "inference_max_batch_size": 8, "inference_max_seq_length": 2560, "inference_dynamic_batching": False,
        "inference_dynamic_batching_buffer_guaranteed_fraction": 0.2, "inference_dynamic_batching_buffer_overflow_factor": None,
        "inference_dynamic_batching_buffer_size_gb": 40.0, "inference_dynamic_batching_max_requests_override": None,
        "inference_dynamic_batching_max_tokens_override": None, "top_p": 0.95, "top_k": 50, "temperature": 0.7,
        "max_length": 256, "max_new_tokens": 128, "use_kv_cache": False}),
)

_REFUSED = (
    ("compressed attention (MLA) is not part of this framework yet", "本框架尚无压缩注意力（MLA）", {
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "qk_rope_head_dim": None, "qk_nope_head_dim": None, "mscale": 1.0, "mscale_all_dim": 1.0, "rotary_scaling_factor": 1.0,
        "mla_mm_split": False, "padded_base_length": 128, "mla_zero_memory": False, "recompute_mla_up_proj": False}),
    ("multi-token prediction is not part of this framework yet", "本框架尚无多token预测（MTP）", {
        "mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1, "recompute_mtp_norm": False, "recompute_mtp_layer": False}),
    ("this schedule is not part of this framework; use pipeline and virtual pipeline sizes", "本框架没有该调度，请使用流水线与虚拟流水线", {
        "moe_fb_overlap": False, "schedules_method": None, "dualpipev_dw_detach": False}),
    ("it would change the loss in a way that is not implemented here", "会以本框架未实现的方式改变损失", {
        "seq_aux": False, "moe_device_level_aux_loss_coeff": 0.0, "moe_comm_aux_loss_coeff": 0.0,
        "moe_use_upcycling": False, "shared_expert_gate": False, "noisy_gate_policy": None}),
    ("this part of a model is not implemented here", "本框架未实现模型的这一部分", {
        "add_output_layer_bias": False, "add_rmsnorm_offset": False, "geglu": False, "gelu_tanh": False, "openai_gelu": False,
        "attn_logit_softcapping": None, "output_logit_softcapping": None, "query_pre_attn_scalar": None,
        "interleave_sliding_window": None, "sliding_window": None, "input_embeds_norm": False, "embed_layernorm": False,
        "input_layernorm_in_fp32": False, "scale_emb": None, "scale_depth": None, "dim_model_base": None,
        "embedding_multiplier_scale": 1.0, "output_multiplier_scale": None, "use_glm_rope": False, "post_norm": False,
        "mrope_section": [], "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "init_method_xavier_uniform": False, "cla_share_factor": 1, "share_kvstates": False, "alibi": False,
        "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
        "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "hybrid_override_pattern": None, "is_hybrid_model": False,
        "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128, "skip_bias_add": True, "input_jitter": True}),
    ("fp8 and reduced optimizer precision are not implemented here", "本框架未实现fp8及低精度优化器", {
        "fp8_recipe": "delayed", "fp8_margin": 0, "fp8_interval": 1, "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": True, "fp8_param_gather": False, "first_last_layers_bf16": False,
        "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1, "main_grads_dtype": "fp32",
        "main_params_dtype": "fp32", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "o2_optimizer": False,
        "o2_gradient": False, "keep_fp8_transpose_cache_when_using_custom_fsdp": False}),
    ("recompute lists and recompute_granularity choose what is recomputed here", "请用重计算列表和recompute_granularity选择重计算内容", {
        "recompute_modules": [], "recompute_activation_function": False, "recompute_activation_function_num_layers": None,
        "recompute_norm": False, "recompute_norm_num_layers": None, "recompute_in_advance": False,
        "adaptive_recompute_enable": False, "enable_recompute_layers_per_pp_rank": False, "checkpoint_activations": False}),
    ("use zero_level or use_distributed_optimizer", "请使用zero_level或use_distributed_optimizer", {
        "use_custom_fsdp": False, "use_torch_fsdp2": False, "data_parallel_sharding_strategy": "no_shard",
        "num_distributed_optimizer_instances": 1}),
    ("context parallelism here is chosen by context_parallel_algo and ulysses_degree_in_cp", "上下文并行由context_parallel_algo和ulysses_degree_in_cp选择", {
        "hierarchical_context_parallel_sizes": [], "cp_window_size": 1, "cp_attention_mask_type": "causal",
        "attention_mask_type": "causal"}),
    ("tensor parallelism here is one-dimensional", "本框架的张量并行是一维的", {
        "tp_2d": False, "tp_x": 1, "tp_y": 1, "use_nd_matmul": False, "nd1_dim1_size": 1, "nd2_dim1_size": 1}),
    ("an old name; use --micro-batch-size, --tensor-model-parallel-size, --lr-warmup-iters or --context-parallel-size",
     "旧名称，请使用--micro-batch-size、--tensor-model-parallel-size、--lr-warmup-iters等", {
         "batch_size": None, "model_parallel_size": None, "warmup": None}),
    ("give the list itself with --data-path, or in a yaml file", "请直接用--data-path给出列表，或写入yaml", {
        "data_args_path": None, "per_split_data_args_path": None}),
    ("write the settings in a yaml file for --config instead", "请写入yaml并用--config读取", {"yaml_cfg": None}),
    ("convert checkpoints with the converter, apart from training", "请用转换工具在训练之外转换检查点", {
        "ckpt_convert_format": None, "ckpt_convert_save": None}),
    ("use non_persistent_save_interval", "请使用non_persistent_save_interval", {
        "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None, "non_persistent_local_ckpt_dir": None}),
    ("checks of this kind are not implemented here", "本框架未实现此类检查", {
        "check_for_spiky_loss": False, "check_for_large_grads": False, "iterations_to_skip": []}),
    ("post-training has its own entry", "后训练有单独的入口", {
        "stage": None, "is_instruction_dataset": False, "is_pairwise_dataset": False, "full_shuffle_instruction_dataset": False,
        "padded_samples": False, "neat_pack": False, "cut_max_seqlen": False, "no_cut_token": False, "lora_load": None,
        "lora_modules_to_save": [], "lora_register_forward_hook": ["word_embeddings", "input_layernorm"],
        "lora_ckpt_filter": False, "qlora": False, "qlora_save_dequantize": False, "ref_model": None, "reward_model": None}),
    ("encoder-decoder models are not part of this framework", "本框架没有编解码模型", {
        "encoder_tensor_model_parallel_size": 0, "encoder_pipeline_model_parallel_size": 0,
        "pipeline_model_parallel_split_rank": None, "decoder_seq_length": None, "bert_binary_head": True,
        "bert_load": None, "output_bert_embeddings": False, "bert_embedder_type": "megatron", "onnx_safe": None}),
    ("Tiktoken files are not read; convert the tokenizer to tokenizer.json", "不支持Tiktoken文件，请转换为tokenizer.json", {
        "tiktoken_pattern": None, "tiktoken_num_special_tokens": 1000, "tiktoken_special_tokens": []}),
    ("retrieval models are not part of this framework", "本框架没有检索模型", {
        "retro_project_dir": None, "retro_cyclic_train_iters": None, "retro_encoder_layers": 2, "retro_encoder_hidden_dropout": 0.1,
        "retro_encoder_attention_dropout": 0.1, "retro_num_neighbors": 2, "retro_num_retrieved_chunks": 2,
        "retro_attention_gate": 1, "retro_verify_neighbor_count": True, "retriever_seq_length": 256, "ict_head_size": None,
        "biencoder_projection_dim": 0, "biencoder_shared_query_context_model": False, "ict_load": None, "titles_data_path": None,
        "query_in_block_prob": 0.1, "use_one_sent_docs": False, "evidence_data_path": None,
        "retriever_report_topk_accuracies": [], "retriever_score_scaling": False, "block_data_path": None, "embedding_path": None,
        "indexer_batch_size": 128, "indexer_log_interval": 1000}),
    ("vision models are not part of this framework", "本框架没有视觉模型", {
        "num_classes": 1000, "img_h": 224, "img_w": 224, "num_channels": 3, "patch_dim": 16, "classes_fraction": 1.0,
        "data_per_class_fraction": 1.0, "data_sharding": True, "head_lr_mult": 1.0, "vision_pretraining": False,
        "vision_pretraining_type": "classify", "vision_backbone_type": "vit", "swin_backbone_type": "tiny",
        "mask_type": "random", "mask_factor": 1.0, "iter_per_epoch": 1250, "dino_local_img_size": 96,
        "dino_local_crops_number": 10, "dino_head_hidden_size": 2048, "dino_bottleneck_size": 256, "dino_freeze_last_layer": 1,
        "dino_norm_last_layer": False, "dino_warmup_teacher_temp": 0.04, "dino_teacher_temp": 0.07,
        "dino_warmup_teacher_temp_epochs": 30}),
)


def _rows(groups, status, seen):
    for reason, reason_zh, names in groups:
        for name, default in names.items():
            form = ON if default is False else OFF if default is True else LIST if isinstance(default, list) else VALUE
            usual = flag_of(name) if form != OFF else "--no-" + flag_of(name)[2:]
            flag = _FLAGS.get(name, usual)
            flags, off_flags = ((), (flag,)) if form == OFF else ((flag,), ())
            yield Row(name, "", flags, off_flags, form, _NAMES.get(name, ()), default, None, status, reason, reason_zh, seen=seen)


ROWS = (*_rows(_IGNORED, IGNORED, "log"), *_rows(_REFUSED, REFUSED, "error"))
# what Megatron writes into the Namespace while it runs: no options
RUNTIME_NAMES = frozenset((
    "rank", "world_size", "iteration", "curr_iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
    "num_floating_point_operations_so_far", "model_type", "do_train", "do_valid", "do_test", "encoder_seq_length",
    "typed_options", "config"))
