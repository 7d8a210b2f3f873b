"""Llama 1 to 3.2 (rope scaling linear, llama3, yarn), and models that were published as such: Vicuna, Yi, SmolLM2, ..."""

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.rules import Field, Fixed, Heads, Rotary, m

_OURS, _THEIRS = "language_model.encoder.layers.{layer}", "model.layers.{layer}"

SETTINGS = {
    "model_config.normalization": "RMSNorm",
    "model_config.position_embedding_type": "rope",
    "model_config.add_bias_linear": False,
    "model_config.gated_linear_unit": True,
}
OUTER_WEIGHTS = (
    Weight("language_model.embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Weight("language_model.encoder.final_norm.weight", ("model.norm.weight",)),
    Weight("language_model.output_layer.weight", ("lm_head.weight",)),
)
NORM_WEIGHTS = (
    Weight(f"{_OURS}.input_norm.weight", (f"{_THEIRS}.input_layernorm.weight",)),
    Weight(f"{_OURS}.post_attention_norm.weight", (f"{_THEIRS}.post_attention_layernorm.weight",)),
)
ATTENTION_WEIGHTS = tuple(
    weight
    for end in ("weight", "bias")
    for weight in (
        Weight(
            f"{_OURS}.attention.qkv_proj.{end}", tuple(f"{_THEIRS}.self_attn.{name}_proj.{end}" for name in ("q", "k", "v"))
        ),
        Weight(f"{_OURS}.attention.out_proj.{end}", (f"{_THEIRS}.self_attn.o_proj.{end}",)),
    )
)
MLP_WEIGHTS = tuple(
    weight
    for end in ("weight", "bias")
    for weight in (
        Weight(f"{_OURS}.mlp.mapping.{end}", tuple(f"{_THEIRS}.mlp.{name}_proj.{end}" for name in ("gate", "up"))),
        Weight(f"{_OURS}.mlp.projection.{end}", (f"{_THEIRS}.mlp.down_proj.{end}",)),
    )
)
WEIGHTS = (*OUTER_WEIGHTS, *NORM_WEIGHTS, *ATTENTION_WEIGHTS, *MLP_WEIGHTS)
# each layer of early files holds the frequencies of its rotary positions
COMPUTED = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

SIZES = (
    Field("vocab_size", m("vocab_size")),
    Field("hidden_size", m("hidden_size")),
    Field("intermediate_size", m("ffn_hidden_size")),
    Field("num_hidden_layers", m("num_layers")),
    Field("max_position_embeddings", m("max_position_embeddings")),
)


def numerics(epsilon=1e-6):
    """Rules of activation, epsilon of the norms where it is left out, initialisation and dropout."""
    return (
        Field("hidden_act", m("hidden_act"), "silu", {"silu": "swiglu", "swish": "swiglu"}),
        Field("rms_norm_eps", m("norm_epsilon"), epsilon),
        Field("initializer_range", m("init_method_std"), 0.02),
        Field("attention_dropout", m("attention_dropout"), 0.0),
    )


NUMERICS = numerics()


def tied(default):
    """Rule of `tie_word_embeddings`, which means `default` where it is left out."""
    return Field("tie_word_embeddings", m("untie_embeddings_and_output_weights"), default, {True: False, False: True})


register_family(
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        weights=WEIGHTS,
        settings=SETTINGS,
        rules=(
            *SIZES,
            *NUMERICS,
            Heads(),
            Rotary(),
            tied(False),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
            Field("mlp_bias", m("mlp_has_bias"), False),
            Fixed("pretraining_tp", (1, 2, 4, 8, None)),  # how the first training was cut: no other numbers
        ),
        computed=COMPUTED,
    )
)
