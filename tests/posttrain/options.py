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
}
