"""GPT-2: learned positions, biases, LayerNorm; its linears are stored as [in, out], query, key and value in one."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.rules import Field, Fixed, checked, m

_OURS, _THEIRS = "language_model.encoder.layers.{layer}", "transformer.h.{layer}"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
_NORM_ENDS = (("gamma", "weight"), ("beta", "bias"))


def _norm(ours, theirs):
    return tuple(Weight(f"{ours}.{end}", (f"{theirs}.{other}",)) for end, other in _NORM_ENDS)


def _linear(ours, theirs):
    return Weight(f"{ours}.weight", (f"{theirs}.weight",), transposed=True), Weight(f"{ours}.bias", (f"{theirs}.bias",))


@dataclass(frozen=True)
class Activation:
    """`activation_function`; a gelu that runs fused with its bias has the tanh form, as in Megatron."""

    paths: tuple = m("hidden_act", "bias_gelu_fusion")
    names = MappingProxyType({"model_config.hidden_act": "activation_function"})

    def read(self, config):
        name = config.get("activation_function", "gelu_new")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise ValueError(f"activation_function is {name!r}: expected one of {', '.join(_ACTIVATIONS)}")
        return dict(zip(self.paths, (_ACTIVATIONS[name], False)))

    def write(self, settings):
        ours, is_fused = (settings[path] for path in self.paths)
        ours = "gelu_tanh" if ours == "gelu" and is_fused else ours
        found = [name for name, other in _ACTIVATIONS.items() if other == ours]
        if not found:
            raise ValueError(f"cannot say {self.paths[0]} = {ours!r}")
        return {"activation_function": found[0]}


@dataclass(frozen=True)
class Dropout:
    """`resid_pdrop` and `embd_pdrop`, which are one setting here, as in Megatron."""

    paths: tuple = m("hidden_dropout")
    names = MappingProxyType({"model_config.hidden_dropout": "resid_pdrop"})
    fields = ("embd_pdrop",)

    def read(self, config):
        found = {name: checked(name, config.get(name), self.paths[0]) for name in ("resid_pdrop", "embd_pdrop")}
        after_blocks, of_words = (0.1 if value is None else value for value in found.values())
        if after_blocks != of_words:
            raise ValueError(
                f"resid_pdrop is {after_blocks!r}, but embd_pdrop {of_words!r}: there is one dropout for both here"
            )
        return {self.paths[0]: after_blocks}

    def write(self, settings):
        return dict.fromkeys(("resid_pdrop", "embd_pdrop"), settings[self.paths[0]])


register_family(
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        weights=(
            Weight("language_model.embedding.word_embeddings.weight", ("transformer.wte.weight",)),
            Weight("language_model.embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
            *_norm(f"{_OURS}.input_norm", f"{_THEIRS}.ln_1"),
            *_linear(f"{_OURS}.attention.qkv_proj", f"{_THEIRS}.attn.c_attn"),
            *_linear(f"{_OURS}.attention.out_proj", f"{_THEIRS}.attn.c_proj"),
            *_norm(f"{_OURS}.post_attention_norm", f"{_THEIRS}.ln_2"),
            *_linear(f"{_OURS}.mlp.mapping", f"{_THEIRS}.mlp.c_fc"),
            *_linear(f"{_OURS}.mlp.projection", f"{_THEIRS}.mlp.c_proj"),
            *_norm("language_model.encoder.final_norm", "transformer.ln_f"),
            Weight("language_model.output_layer.weight", ("lm_head.weight",)),
        ),
        settings={
            "model_config.normalization": "LayerNorm",
            "model_config.position_embedding_type": "learned_absolute",
            "model_config.add_bias_linear": True,
            "model_config.gated_linear_unit": False,
            "model_config.group_query_attention": False,
        },
        rules=(
            Field("vocab_size", m("vocab_size"), 50257),
            Field("n_embd", m("hidden_size"), 768),
            Field("n_inner", m("ffn_hidden_size"), lambda config: 4 * (config.get("n_embd") or 768)),
            Field("n_layer", m("num_layers"), 12),
            Field("n_head", m("num_attention_heads"), 12),
            Field("n_positions", m("max_position_embeddings"), 1024),
            Activation(),
            Field("layer_norm_epsilon", m("norm_epsilon"), 1e-5),
            Field("initializer_range", m("init_method_std"), 0.02),
            Field("attn_pdrop", m("attention_dropout"), 0.1),
            Dropout(),
            Field("tie_word_embeddings", m("untie_embeddings_and_output_weights"), True, {True: False, False: True}),
            Fixed("scale_attn_weights", (True,)),
            Fixed("scale_attn_by_inverse_layer_idx", (False,)),
            Fixed("add_cross_attention", (False,)),
        ),
        computed=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
    )
)
