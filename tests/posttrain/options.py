"""Options of post-training alone: path -> (stage, values that differ, settings beside)."""

T, D = "training_config", "dataset_config"

OPTIONS = {
    f"{T}.dpo_beta": ("dpo", 0.5, {}),
    f"{T}.dpo_loss_type": ("dpo", "ipo", {}),
    f"{T}.dpo_label_smoothing": ("dpo", 0.25, {}),
    f"{T}.pref_ftx": ("dpo", 0.5, {}),
    f"{T}.dpo_reference_free": ("dpo", True, {}),
    f"{T}.ref_model": ("dpo", "{other}", {}),
    f"{T}.simpo_beta": ("simpo", 1.0, {}),
    f"{T}.gamma_beta_ratio": ("simpo", 0.25, {}),
    f"{T}.simpo_loss_type": ("simpo", "hinge", {}),
    f"{T}.simpo_label_smoothing": ("simpo", 0.25, {}),
    # raw records
    f"{D}.reward_tokens": ("prm", ["+", "-", "="], {"reward_tokens": ["+", "-"]}),
    f"{D}.placeholder_token": ("prm", "@", {"reward_tokens": ["+", "-"]}),
    f"{D}.pack": ("sft", True, {}),
    f"{D}.handler_name": ("sft", "SharegptStyleInstructionHandler", {}),
    f"{D}.prompt_type": ("sft", "chatml", {}),
    f"{D}.prompt_type_path": ("sft", "{folder}/templates.json", {}),
    f"{D}.map_keys": ("sft", {"prompt": "instruction", "query": "", "response": "output"}, {}),
    f"{D}.enable_thinking": ("sft", True, {"prompt_type": "qwen3"}),
    f"{D}.append_eod": ("sft", True, {"prompt_type": "empty"}),
}

# of trainings on rewards: path -> (stage, value, settings of training_config beside)
ROLLOUT_OPTIONS = {
    f"{T}.reward_function": ("grpo", "{folder}/rewards.py:dense", {}),
    f"{T}.reward_model": ("grpo", "{rewards}", {"reward_function": None}),
    f"{T}.num_generations": ("grpo", 2, {}),
    f"{T}.rollout_batch_size": ("grpo", 16, {}),
    f"{T}.ppo_epochs": ("grpo", 2, {}),
    f"{T}.max_new_tokens": ("grpo", 3, {}),
    f"{T}.temperature": ("grpo", 0.5, {}),
    f"{T}.top_k": ("grpo", 4, {}),
    f"{T}.top_p": ("grpo", 0.5, {}),
    f"{T}.missing_eos_penalty": ("grpo", 2.0, {}),
    f"{T}.clip_ratio": ("grpo", 0.01, {"ppo_epochs": 3}),
    f"{T}.grpo_beta": ("grpo", 1.0, {}),
    f"{T}.kl_coef": ("trl_ppo", 3.0, {}),
    f"{T}.gamma": ("trl_ppo", 0.5, {}),
    f"{T}.lam": ("trl_ppo", 0.5, {}),
    f"{T}.cliprange_value": ("trl_ppo", 0.001, {"ppo_epochs": 3}),
    f"{T}.vf_coef": ("trl_ppo", 1.0, {}),
}
