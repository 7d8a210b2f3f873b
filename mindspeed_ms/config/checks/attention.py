"""Rules about multi-latent attention."""

from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.latent_attention import MULTI_LATENT

_M = "model_config"


@rule
def latent_attention_fits(context):
    """Refuse settings that contradict multi-latent attention, or that it does not compute."""
    model, path = context.model, f"{_M}.multi_latent_attention"
    if not model:
        return
    is_latent = model.attention_type == MULTI_LATENT
    if is_latent != model.multi_latent_attention:
        kind = f"is attention_type {MULTI_LATENT}; keep one"
        yield context.problem(path, kind, f"{_M}.attention_type")
    if not (is_latent and model.multi_latent_attention):
        return
    if model.position_embedding_type != "rope":
        yield context.problem(path, "needs position_embedding_type rope", f"{_M}.position_embedding_type")
    if model.group_query_attention:
        yield context.problem(path, "expands keys and values of every head; leave groups out", f"{_M}.group_query_attention")
    if model.softmax_type != "vanilla":
        yield context.problem(f"{_M}.softmax_type", "is not computed by multi_latent_attention; use vanilla", path)
    if context.was_set(f"{_M}.kv_channels") and model.kv_channels != model.qk_head_dim + model.qk_pos_emb_head_dim:
        context.notice(
            f"{context.name(f'{_M}.kv_channels')}: no effect, since multi_latent_attention has qk_head_dim and "
            "qk_pos_emb_head_dim"
        )
