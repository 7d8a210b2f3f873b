"""Rule about what multi-token prediction (MTP) does not work with."""

from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.layout.model_description import OTHER_POSITIONS

_PATH = "model_config.mtp_num_layers"


@rule
def multi_token_prediction_fits(context):
    """Refuse multi-token prediction beside settings that it does not work with."""
    model = context.model
    if not model or not model.mtp_num_layers:
        return
    if model.seq_length and model.mtp_num_layers >= model.seq_length:
        message = f"predicts beyond the sequence; expects at most {model.seq_length - 1}"
        yield context.problem(_PATH, message, "model_config.seq_length")
    refused = (
        ("parallel_config.context_parallel_size", context.parallel.context_parallel_size > 1, "1"),
        ("model_config.position_embedding_type", model.position_embedding_type not in OTHER_POSITIONS, "rope or none"),
        ("training_config.stage", context.training.stage is not None, "none"),
        ("lora_config.use_lora", context.lora.use_lora, "False"),
    )
    for path, is_refused, expected in refused:
        if is_refused:
            yield context.problem(_PATH, f"does not work with {context.name(path)} yet (expected {expected})", path)
