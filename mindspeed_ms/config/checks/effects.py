"""Rule about settings that have no effect without another one."""

from mindspeed_ms.config.argument_table import row_at, rows_with_path
from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.posttrain import PAIRWISE_STAGES, ROLLOUT_STAGES, STAGES

_T, _D, _P, _O = "training_config", "dataset_config", "parallel_config", "optimizer_config"
_TENSORBOARD = ("log_interval", "queue_size")
_OF_ROLLOUTS = ("reward_function", "reward_model", "num_generations", "rollout_batch_size", "ppo_epochs", "clip_ratio")
_OF_ROLLOUTS += ("max_new_tokens", "temperature", "top_k", "top_p", "missing_eos_penalty")
_LOGGED = ("loss_scale", "learning_rate", "timers", "batch_size", "memory", "validation_ppl")
_LOSS_SCALE = ("loss_scale", "loss_scale_value", "loss_scale_factor", "loss_scale_window", "min_loss_scale", "hysteresis")
_ROPE_SCALING = {
    ("llama3",): ("low_freq_factor", "high_freq_factor"),
    ("llama3", "yarn"): ("original_max_position_embeddings",),
    ("yarn",): ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


def _paths(section, *names):
    return tuple(f"{section}.{name}" for name in names)


def _section(name, *without):
    return tuple(row.path for row in rows_with_path() if row.section == name and row.path not in without)


# (paths, the needed setting in words, function: whether a configuration has it)
NEEDS = (
    (("model_config.mtp_loss_scaling_factor",), "mtp_num_layers", lambda context: context.value("model_config.mtp_num_layers")),
    (
        (*_section("moe_config", "moe_config.num_experts"), *_paths(_P, "expert_tensor_parallel_size")),
        "experts (moe_config.num_experts)",
        lambda context: context.moe.num_experts > 1,
    ),
    (
        ("moe_config.moe_aux_loss_coeff",),
        "moe_router_load_balancing_type aux_loss or seq_aux_loss",
        lambda context: context.moe.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss"),
    ),
    (
        ("moe_config.moe_router_bias_update_rate",),
        "moe_router_enable_expert_bias",
        lambda context: context.moe.moe_router_enable_expert_bias,
    ),
    (
        ("moe_config.moe_token_drop_policy",),
        "moe_expert_capacity_factor",
        lambda context: context.moe.moe_expert_capacity_factor is not None,
    ),
    (
        ("moe_config.moe_router_load_balancing_type",),
        "moe_aux_loss_coeff",
        lambda context: (
            context.moe.moe_router_load_balancing_type not in ("aux_loss", "seq_aux_loss") or context.moe.moe_aux_loss_coeff
        ),
    ),
    (
        ("moe_config.moe_router_pre_softmax",),
        "moe_router_score_function softmax",
        lambda context: context.moe.moe_router_score_function == "softmax",
    ),
    (("moe_config.moe_router_group_score_topk",), "moe_router_num_groups", lambda context: context.moe.moe_router_num_groups),
    (
        ("moe_config.norm_topk_prob",),
        "moe_router_pre_softmax of softmax scores (the probabilities sum to 1 already)",
        lambda context: context.moe.moe_router_pre_softmax and context.moe.moe_router_score_function == "softmax",
    ),
    *(
        (
            _paths("model_config.rope_scaling", *names),
            f"rope_scaling.type {' or '.join(kinds)}",
            lambda context, kinds=kinds: context.value("model_config.rope_scaling.type") in kinds,
        )
        for kinds, names in _ROPE_SCALING.items()
    ),
    (
        _paths("model_config", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        "multi_latent_attention",
        lambda context: context.value("model_config.multi_latent_attention"),
    ),
    (
        _paths("model_config", "swiglu_limit", "swiglu_alpha"),
        "hidden_act clamped_swiglu",
        lambda context: context.value("model_config.hidden_act") == "clamped_swiglu",
    ),
    (
        _paths("model_config", "qk_layernorm_epsilon"),
        "qk_layernorm",
        lambda context: context.value("model_config.qk_layernorm"),
    ),
    *(
        (
            _paths(section, *names),
            f"{_T}.stage {' or '.join(stages)}",
            lambda context, stages=stages: context.training.stage in stages,
        )
        for stages, section, names in (
            (("dpo",), _T, ("dpo_beta", "dpo_loss_type", "dpo_label_smoothing", "pref_ftx", "dpo_reference_free")),
            (("dpo", *ROLLOUT_STAGES), _T, ("ref_model",)),
            (ROLLOUT_STAGES, _T, _OF_ROLLOUTS),
            (("grpo",), _T, ("grpo_beta",)),
            (("trl_ppo",), _T, ("kl_coef", "gamma", "lam", "cliprange_value", "vf_coef")),
            (("simpo",), _T, ("simpo_beta", "gamma_beta_ratio", "simpo_loss_type", "simpo_label_smoothing")),
            (("prm",), _D, ("placeholder_token", "reward_tokens")),
            (STAGES, _D, ("pack", "handler_name", "prompt_type", "prompt_type_path", "map_keys", "enable_thinking")),
            (("sft", *PAIRWISE_STAGES), _D, ("append_eod",)),
        )
    ),
    *(
        (
            _paths(_T, f"{stage}_label_smoothing"),
            f"{stage}_loss_type sigmoid",
            lambda context, stage=stage: context.training.stage != stage or context.training[f"{stage}_loss_type"] == "sigmoid",
        )
        for stage in ("dpo", "simpo")
    ),
    *(
        (
            _paths(_T, "ref_model"),
            f"a {weight} above 0",
            lambda context, stage=stage, weight=weight: context.training.stage != stage or context.training[weight],
        )
        for stage, weight in (("grpo", "grpo_beta"), ("trl_ppo", "kl_coef"))
    ),
    (
        _paths(_T, "clip_ratio", "cliprange_value"),
        "several steps that learn from the same answers (ppo_epochs, rollout_batch_size)",
        lambda context: context.training.stage not in ROLLOUT_STAGES or _has_several_steps(context),
    ),
    (
        _paths(_D, "prompt_type", "prompt_type_path", "enable_thinking"),
        "conversations: the texts of stage prm are taken as they are",
        lambda context: context.training.stage != "prm",
    ),
    (
        _paths(_D, "reset_attention_mask", "reset_position_ids"),
        f"documents that are packed together: a corpus, or {_T}.stage sft",
        lambda context: context.training.stage in (None, "sft"),
    ),
    (
        _paths(_D, "eod_mask_loss"),
        "a corpus of documents",
        lambda context: not (context.training.stage or context.dataset.is_instruction_dataset),
    ),
    (_paths(_D, "pad_to_multiple_of"), f"{_P}.variable_seq_lengths", lambda context: context.parallel.variable_seq_lengths),
    (
        _paths(_D, "full_shuffle_instruction_dataset", "neat_pack"),
        f"{_D}.is_instruction_dataset",
        lambda context: context.dataset.is_instruction_dataset or context.dataset.is_pairwise_dataset,
    ),
    (_section("lora_config", "lora_config.use_lora"), "lora_config.use_lora", lambda context: context.lora.use_lora),
    (
        _paths(_T, *(f"tensorboard_{name}" for name in _TENSORBOARD), *(f"log_{name}_to_tensorboard" for name in _LOGGED)),
        f"{_T}.tensorboard_dir",
        lambda context: context.training.tensorboard_dir,
    ),
    (
        _paths(_T, "log_validation_ppl_to_tensorboard"),
        f"a loss of tokens: pretraining, or {_T}.stage sft",
        lambda context: context.training.stage in (None, "sft"),
    ),
    (_paths(_T, "timing_log_option"), f"{_T}.timing_log_level", lambda context: context.training.timing_log_level),
    (_paths(_T, "manual_gc_interval"), f"{_T}.manual_gc", lambda context: context.training.manual_gc),
    (_paths(_T, "eval_iters"), f"{_T}.eval_interval", lambda context: context.training.eval_interval),
    (
        _paths(_T, "save_interval", "non_persistent_save_interval", "async_save", "keep_checkpoint_max"),
        f"{_T}.save_enabled",
        lambda context: context.training.save_enabled,
    ),
    (_paths(_T, *_LOSS_SCALE), f"{_T}.fp16", lambda context: context.training.fp16),
    (_paths(_O, "sgd_momentum"), "optimizer_type sgd", lambda context: not context.optimizer.is_adam),
    (_paths(_O, "betas", "eps"), "an Adam as optimizer_type", lambda context: context.optimizer.is_adam),
    (_paths(_O, "lr_wsd_decay_style"), "lr_decay_style WSD", lambda context: context.optimizer.lr_decay_style == "WSD"),
    (
        _paths(_P, "context_parallel_algo", "ulysses_degree_in_cp"),
        f"a {_P}.context_parallel_size above 1",
        lambda context: context.parallel.context_parallel_size > 1,
    ),
    (
        _paths(_D, "vocab_extra_ids"),
        "tokenizer_type SentencePieceTokenizer or a given vocab_size",
        lambda context: (
            context.dataset.tokenizer_type in (None, "SentencePieceTokenizer") or context.was_set(f"{_D}.vocab_size")
        ),
    ),
)


def _has_several_steps(context):
    size, batch = context.training.rollout_batch_size, context.dataset.global_batch_size
    return context.training.ppo_epochs > 1 or bool(size and batch and size > batch)


@rule
def settings_have_an_effect(context):
    """Notice if settings differ from their default but have no effect."""
    for paths, need, has_it in NEEDS:
        if has_it(context):
            continue
        idle = [
            path for path in paths if context.was_set(path) and context.value(path) not in (None, row_at(path).guide_default)
        ]
        names = list(dict.fromkeys(map(context.name, idle)))
        if names:
            context.notice(f"{', '.join(names)}: no effect without {need}")
    return ()


@rule
def padding_is_used(context):
    """Notice if a typed `make_vocab_size_divisible_by` lies beside a padded size that is no such multiple; files often do."""
    path = "model_config.make_vocab_size_divisible_by"
    if context.model is not None and context.was_argument(path):
        unit = context.model.make_vocab_size_divisible_by * context.parallel.tensor_model_parallel_size
        padded, own = (context.settings.by_path.get(of) for of in ("model_config.vocab_size", f"{_D}.vocab_size"))
        follows = padded is None or (own is not None and (padded.key, padded.place) == (own.key, own.place))
        if not follows and context.model.vocab_size % unit:
            context.notice(f"{context.name(path)}: no effect, since {padded.key} = {padded.value} ({padded.place}) is given")
    return ()
