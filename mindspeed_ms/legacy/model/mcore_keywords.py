"""Keywords of Megatron core's GPTModel that repeat a setting of the TransformerConfig: they must say the same as it does."""

from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.core import parallel_state

# keyword -> (field of model_config, function of the TransformerConfig that gives the keyword's value)
_SETTINGS = {
    "vocab_size": ("vocab_size", lambda config: config.vocab_size),
    "max_sequence_length": ("max_position_embeddings", lambda config: config.max_position_embeddings or config.seq_length),
    "fp16_lm_cross_entropy": ("fp16_lm_cross_entropy", lambda config: config.fp16_lm_cross_entropy),
    "share_embeddings_and_output_weights": (
        "untie_embeddings_and_output_weights",
        lambda config: not config.untie_embeddings_and_output_weights,
    ),
    "position_embedding_type": ("position_embedding_type", lambda config: config.position_embedding_type),
    "rotary_percent": ("rotary_percent", lambda config: config.rotary_percent),
    "rotary_base": ("rotary_base", lambda config: config.rotary_base),
    "rope_scaling": ("rope_scaling.type", lambda config: getattr(config.rope_scaling, "type", None) == "llama3"),
    "rope_scaling_factor": ("rope_scaling.factor", lambda config: getattr(config.rope_scaling, "factor", None)),
    "seq_len_interpolation_factor": (
        "rotary_seq_len_interpolation_factor",
        lambda config: config.rotary_seq_len_interpolation_factor,
    ),
}
# keywords whose objects do not exist here, and the setting that does the same
_SPECS = {
    "transformer_layer_spec": "the layers follow from the configuration (model_config.normalization, hidden_act, qk_layernorm, "
    "moe_config, ...)",
    "mtp_block_spec": "multi-token prediction follows from the configuration (model_config.mtp_num_layers, --mtp-num-layers)",
}
_OTHERS = ("vp_stage", "scatter_embedding_sequence_parallel")
KEYWORDS = (*_SETTINGS, *_SPECS, *_OTHERS)


def check_keywords(config, keywords):
    """Check keywords of Megatron core's GPTModel against the model's TransformerConfig; None says nothing.

    Args:
        config (TransformerConfig): the model.
        keywords (dict): those given.

    Raises:
        ValueError: a keyword with another value than the setting that decides, or with an object that does not exist here.
    """
    for name, value in keywords.items():
        if value is None:
            continue
        if name in _SPECS:
            raise ValueError(f"GPTModel: {name} is {value!r}, but no specs exist here: {_SPECS[name]}. Leave it out.")
        if name in _SETTINGS:
            field, setting = _SETTINGS[name]
            _compare(config, name, value, f"model_config.{field}", setting(config))
        elif name == "vp_stage":
            stage = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
            if value != stage:
                raise ValueError(
                    f"GPTModel: vp_stage is {value!r}, but the chunk that is built is {stage}: expected that of "
                    "parallel_state.get_virtual_pipeline_model_parallel_rank(), or leave it out."
                )
        elif value is not True:
            raise ValueError(
                f"GPTModel: {name} is {value!r}: with parallel_config.sequence_parallel the embedding is always scattered "
                "here, expected True, or leave it out."
            )


def _compare(config, name, value, path, expected):
    if value == expected and isinstance(value, bool) == isinstance(expected, bool):
        return
    if name == "rope_scaling_factor" and expected is None:
        return  # as in Megatron, where it does nothing without rope_scaling
    row = row_at(path)
    flag = f" ({row.flags[0]})" if row is not None and row.flags else ""
    raise ValueError(
        f"GPTModel: {name} is {value!r}, but the configuration says {expected!r}: {path}{flag} decides. Set it there, and "
        f"leave {name} out or give it the same value."
    )
