"""Flags of other converters that are taken without effect, or refused, with the reason. Names without dashes."""

_ONE_READER = "source and target are recognised by their files"

# MindSpeed-LLM's `convert_ckpt.py` and `convert_ckpt_v2.py`
IGNORED = {
    "loader": _ONE_READER,
    "saver": _ONE_READER,
    "max_queue_size": "tensors are read and written one at a time",
    "no_checking": "everything is checked in any case",
    "ai_framework": "the files are the same for both",
    "ckpt_cfg_path": "the names of tensors are part of the families (docs/new-model-family.md)",
    "save_layer_by_layer": "tensors are written one at a time in any case",
    "transformer_impl": "the names in the files say it, and Megatron's files keep theirs",
    "w_pack": "whether tensors are packed is seen in the files",
    "debug": "every message is shown",
    "process_limit": "there are no processes to limit",
    "process_timeout": "there are no processes to wait for",
    "multiprocess_off": "there are no processes to switch off",
    "parallel_init_order": "ranks are recognised by their folders",
    "generate_all_dp_cp": "data-parallel ranks read the same files",
    "dist_opt_content": "the whole state of the optimizer is taken",
    "load_hf_from_config": "no model is built",
    "lora_target_modules": "the folder of --lora-load says it",
    "lora_r": "the folder of --lora-load says it",
    "lora_alpha": "the folder of --lora-load says it",
}
IGNORED_WITHOUT_VALUE = (
    "no_checking",
    "save_layer_by_layer",
    "w_pack",
    "debug",
    "multiprocess_off",
    "generate_all_dp_cp",
    "load_hf_from_config",
)
REFUSED = {
    "trust_remote_code": "code of a model's folder is never run. Leave it out.",
    "spec": "layers are described by the families (docs/new-model-family.md). Leave it out.",
    "post_norm": "a second norm after each block belongs to no known family.",
    "qlora_nf4": "4-bit weights are not written.",
    "orm": "reward heads are not converted.",
    "embed_layernorm": "a norm after the embedding belongs to no known family.",
    "add_output_layer_bias": "a bias of the head belongs to no known family.",
    "save_lora_to_hf": "adapters go to a PEFT folder by: python -m mindspeed_ms.tools.lora export.",
    "mla_mm_split": "compressed attention (MLA) is not part of this framework yet.",
    "schedules_method": "dualpipev is no schedule of this framework.",
    "moe_tp_extend_ep": "experts are cut by --target-expert-parallel-size alone.",
}
REFUSED_WITHOUT_VALUE = (
    "trust_remote_code",
    "post_norm",
    "qlora_nf4",
    "orm",
    "embed_layernorm",
    "add_output_layer_bias",
    "save_lora_to_hf",
    "mla_mm_split",
    "moe_tp_extend_ep",
)
# what cannot be written in Megatron's format torch_dist
WITHOUT_TORCH_DIST = {
    "save_to_legacy": "Megatron has only the format torch for its legacy models.",
    "noop_layers": "it numbers layers by their place, and Megatron loads none without weights.",
}
