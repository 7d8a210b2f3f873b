"""Describers of GPT: embedding, transformer layer and head. Names: upstream's legacy GPTModel."""

from dataclasses import replace

from mindspeed_ms.layout.describers.registry import describer, placed, register_describer
from mindspeed_ms.layout.layer_parameters import EmbeddingTable, Linear, Norm
from mindspeed_ms.layout.model_description import POLICY_ARCHITECTURE, REWARD_ARCHITECTURE
from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.sharding import Initializer, ParameterSharding

_WORDS = "embedding.word_embeddings.weight"
WORD_EMBEDDINGS = f"language_model.{_WORDS}"
OUTPUT_LAYER = "language_model.output_layer.weight"
REWARD_HEAD = "reward_head"


def embedding_tables(model):
    """`{name: EmbeddingTable}` of the embedding part."""
    common = {"width": model.hidden_size, "initializer": model.initializers.embedding, "draw_dtype": model.embedding_init_dtype}
    tables = {"word_embeddings": EmbeddingTable(rows=model.vocab_size, is_cut=True, grouping="vocab", **common)}
    if model.has_position_table:
        rows, is_cut = model.max_position_embeddings, model.parallel_position_embedding
        tables["position_embeddings"] = EmbeddingTable(rows=rows, is_cut=is_cut, **common)
    if model.num_tokentypes:
        tables["tokentype_embeddings"] = EmbeddingTable(rows=model.num_tokentypes, is_cut=False, **common)
    return tables


def output_layer(model):
    """Linear of the head: an own one, or the copy of a tied one, which starts like the word embeddings."""
    initial = model.initializers
    return Linear(
        column=True,
        input_size=model.hidden_size,
        output_size=model.vocab_size,
        initializer=initial.embedding if model.is_tied else initial.block,
        bias=None,
        grouping="vocab",
    )


@register_describer("head", POLICY_ARCHITECTURE)
def describe_policy_head(model, rank):
    """Parameters of the heads of a policy with a critic: those of a GPT, and the weight of the value."""
    return [*describe_head(model, rank), *placed(REWARD_HEAD, reward_head(model, rank.tensor))]


def as_tied_copy(model, description):
    """Description of `output_layer.weight` as a copy of the word embeddings, relative to the language model."""
    return replace(description, shared=True, shared_with=_WORDS, draw_dtype=model.embedding_init_dtype)


def shares_embedding(model):
    """Whether first and last stage each hold the word embeddings: for a tied head, or for multi-token prediction."""
    return model.is_tied or bool(model.mtp_num_layers)


def layer_norms(model):
    """`{name: Norm}` of a layer."""
    scales = {"input_norm": 1.0, "post_attention_norm": 1.0}
    if model.use_sandwich_norm:
        scales.update(attn_post_norm=model.attn_post_norm_scale, ffn_post_norm=model.ffn_post_norm_scale)
    return {name: Norm(model.norm, model.hidden_size, scale) for name, scale in scales.items()}


@register_describer("embedding", POLICY_ARCHITECTURE)
@register_describer("embedding", REWARD_ARCHITECTURE)
@register_describer("embedding", "gpt")
def describe_embedding(model, rank):
    """Parameters of the embedding: word, position and token type tables."""
    descriptions = []
    for name, table in embedding_tables(model).items():
        found = placed(f"language_model.embedding.{name}", table.describe(rank.tensor))
        is_shared = name == "word_embeddings" and shares_embedding(model) and rank.is_pipelined
        descriptions += [replace(one, shared=True) if is_shared else one for one in found]
    return descriptions


def describe_embedding_copy(model, rank):
    """The last stage's copy of the word embeddings for multi-token prediction."""
    weights = placed("embedding.word_embeddings", embedding_tables(model)["word_embeddings"].describe(rank.tensor))
    return placed("language_model", [as_tied_copy(model, weight) for weight in weights])


def _layer_parts(model, rank, layer):
    norms = {name: placed(name, norm.describe(rank.tensor)) for name, norm in layer_norms(model).items()}
    attention = describer("attention", model.attention_type)(model, rank)
    mlp = describer("mlp", model.mlp_kind(layer))(model, rank)
    return [
        *norms["input_norm"],
        *placed("attention", attention),
        *norms.get("attn_post_norm", ()),
        *norms["post_attention_norm"],
        *placed("mlp", mlp),
        *norms.get("ffn_post_norm", ()),
    ]


@register_describer("layer", POLICY_ARCHITECTURE)
@register_describer("layer", REWARD_ARCHITECTURE)
@register_describer("layer", "gpt")
def describe_layer(model, rank, layer):
    """Parameters of the global layer `layer`: norms, attention and feed-forward block."""
    return placed(f"language_model.encoder.layers.{layer}", _layer_parts(model, rank, layer))


def mtp_projection(model):
    """Linear that joins embedding and hidden states of a layer of multi-token prediction."""
    return Linear(
        column=True,
        input_size=2 * model.hidden_size,
        output_size=model.hidden_size,
        initializer=model.initializers.block,
        bias=None,
    )


def describe_mtp_layers(model, rank):
    """Parameters of the layers of multi-token prediction, which are like the last layer of the model."""
    norm = Norm(model.norm, model.hidden_size)
    descriptions = []
    for number in range(model.mtp_num_layers or 0):
        parts = [
            *placed("enorm", norm.describe(rank.tensor)),
            *placed("hnorm", norm.describe(rank.tensor)),
            *placed("eh_proj", mtp_projection(model).describe(rank.tensor)),
            *placed("transformer_layer", _layer_parts(model, rank, model.stages.num_layers - 1)),
            *placed("final_layernorm", norm.describe(rank.tensor)),
        ]
        descriptions += placed(f"mtp.layers.{number}", parts)
    return descriptions


def _final_norm(model, rank):
    if not model.use_final_norm:
        return []
    return placed("encoder.final_norm", Norm(model.norm, model.hidden_size).describe(rank.tensor))


@register_describer("head", "gpt")
def describe_head(model, rank):
    """Parameters of the head: final norm, and the weight unless the rank holds both embedding and a tied head; then the layers
    of multi-token prediction."""
    descriptions = _final_norm(model, rank)
    if not model.is_tied or (rank.is_pipelined and not model.mtp_num_layers):
        weights = placed("output_layer", output_layer(model).describe(rank.tensor))
        descriptions += [as_tied_copy(model, weight) for weight in weights] if model.is_tied else weights
    return placed("language_model", descriptions) + describe_mtp_layers(model, rank)


def reward_head(model, part):
    """Parameters of the head of a reward model, relative to it: `weight [1, h]`, whole on every rank, normal with a variance
    of 1 / (h + 1) as TRL's, in the dtype of the parameters."""
    return [
        ParameterDescription(
            "weight",
            ParameterSharding.replicated((1, model.hidden_size)),
            part.dtype,
            Initializer.normal((model.hidden_size + 1) ** -0.5),
            sequence_parallel=part.sequence_parallel,
        )
    ]


@register_describer("head", REWARD_ARCHITECTURE)
def describe_reward_head(model, rank):
    """Parameters of a reward model's head: final norm, and the weight of the value."""
    return [*placed("language_model", _final_norm(model, rank)), *placed(REWARD_HEAD, reward_head(model, rank.tensor))]
