"""Megatron's `args` in a checkpoint: our configuration from them, and the values that its weights show."""

import argparse

from mindspeed_ms.config.argument_table import row_of_name
from mindspeed_ms.config.arguments import settings_of_arguments
from mindspeed_ms.config.errors import ConfigError
from mindspeed_ms.config.resolve import complete
from mindspeed_ms.config.row import REFUSED
from mindspeed_ms.config.settings import Settings, build
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.stages import parse_noop_layers, split_layers
from mindspeed_ms.layout.vocabulary import true_vocab_size

_SECTIONS = ("model_config", "moe_config")
_PATHS = ("training_config.bf16", "training_config.fp16", "dataset_config.tokenizer_type")
# values that follow from the layout, which the files show
_NOT_TAKEN = ("moe_config.moe_grouped_gemm",)


def plain_arguments(namespace):
    """Arguments as a dict with plain values: dtypes and members of enums by their names; {} without a Namespace."""
    if not hasattr(namespace, "__dict__"):
        return {}
    return {str(name): _plain(value) for name, value in vars(namespace).items()}


def _plain(value):
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    module, name = getattr(value, "module", ""), getattr(value, "name", "")
    if module == "torch":
        return f"torch.{name}"
    return None  # no option that shapes a model is of another kind


def configuration_of(arguments, counts, sizes, grouped=False, place=""):
    """AllConfig of the model and layout that a checkpoint's arguments describe.

    Args:
        arguments (dict): of `plain_arguments`, completed by `complete_arguments`.
        counts (list[list[int]]): layers of each stage and chunk, positions of noop layers included.
        sizes (dict): tp, pp, cp, ep, expert_tp.
        grouped (bool): all experts are in `weight1` and `weight2`.
        place (str): file, for messages.

    Raises:
        CheckpointError: the arguments describe no model that exists here.
    """
    values = {name: value for name, value in arguments.items() if _is_taken(name)}
    if values.get("rope_scaling_type") == "linear":  # of ours, which wrote Megatron's own argument for it too
        values.pop("rotary_seq_len_interpolation_factor", None)
    settings = settings_of_arguments(argparse.Namespace(**values))
    kept = Settings()
    for path, setting in settings.by_path.items():
        if (path.partition(".")[0] in _SECTIONS or path in _PATHS) and path not in _NOT_TAKEN:
            kept.add(path, setting.value, setting.key, setting.place)
    kept.problems = list(settings.problems)
    if arguments.get("num_experts"):
        kept.add("moe_config.moe_grouped_gemm", grouped)
    for name, value in parallel_values(counts, sizes, arguments).items():
        kept.add(f"parallel_config.{name}", value)
    try:
        complete(kept)
        return build(kept, required=("model_config",))
    except (ConfigError, LayoutError) as error:
        raise CheckpointError(f"{place}: its args describe a model that cannot be built here: {error}") from error


def _is_taken(name):
    row = row_of_name(name)
    return row is not None and (row.section in _SECTIONS or row.path in _PATHS)


def refused_arguments(arguments):
    """Flags of Megatron's features that are set and do not exist here: list[str]. Weights may be read all the same."""
    values = {name: value for name, value in arguments.items() if _is_refused(name)}
    return list(dict.fromkeys(problem.key for problem in settings_of_arguments(argparse.Namespace(**values)).problems))


def _is_refused(name):
    row = row_of_name(name)
    return row is not None and row.status == REFUSED and not row.path


def parallel_values(counts, sizes, arguments):
    """Settings of parallel_config that a checkpoint's layout has."""
    pp, vpp = len(counts), len(counts[0])
    result = {
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": sizes["ep"],
        "sequence_parallel": bool(arguments.get("sequence_parallel")) and sizes["tp"] > 1,
    }
    if sizes["expert_tp"] != sizes["tp"]:
        result["expert_tensor_parallel_size"] = sizes["expert_tp"]
    if vpp > 1:
        result["virtual_pipeline_model_parallel_size"] = vpp
    try:
        is_even = [list(row) for row in split_layers(sum(map(sum, counts)), pp, vpp if vpp > 1 else None).counts] == counts
    except LayoutError:
        is_even = False
    if not is_even:
        result["num_layer_list"] = [row[0] for row in counts] if vpp == 1 else counts
    if pp > 1 and not any(counts[0]):
        # the list leaves the stage of the embedding out
        result["standalone_embedding_stage"], result["num_layer_list"] = True, result["num_layer_list"][1:]
    if arguments.get("noop_layers"):
        result["noop_layers"] = sorted(parse_noop_layers(arguments["noop_layers"]))
    return result


def complete_arguments(arguments, shapes, sizes, layers):
    """Arguments with those that the checkpoint lacks, as far as shapes show them; present ones stay.

    Args:
        arguments (dict): of `plain_arguments`.
        shapes (dict): core name -> shape of a local tensor, layers by their local index (of any file).
        sizes (dict): of `files.parallel_sizes`.
        layers (int): layers of the whole model.
    """
    shown = {"num_layers": layers, "transformer_impl": "local"}
    inside = {}
    for name, shape in shapes.items():
        if name.startswith("decoder.layers."):
            inside.setdefault(name.split(".", 3)[3], shape)
    words = shapes.get("embedding.word_embeddings.weight")
    if words:
        shown["padded_vocab_size"], shown["hidden_size"] = words[0] * sizes["tp"], words[1]
    positions = shapes.get("embedding.position_embeddings.weight")
    shown["position_embedding_type"] = "learned_absolute" if positions else "rope"
    if positions:
        shown["max_position_embeddings"] = positions[0]
    has_bias = "self_attention.linear_proj.bias" in inside or "mlp.linear_fc2.bias" in inside
    shown["add_bias_linear"] = has_bias
    shown["add_qkv_bias"] = "self_attention.linear_qkv.bias" in inside and not has_bias
    shown["normalization"] = "LayerNorm" if "decoder.final_layernorm.bias" in shapes else "RMSNorm"
    shown["qk_layernorm"] = "self_attention.q_layernorm.weight" in inside
    first, second = inside.get("mlp.linear_fc1.weight"), inside.get("mlp.linear_fc2.weight")
    if first and second:
        shown["ffn_hidden_size"] = second[1] * sizes["tp"]
        shown["swiglu"] = first[0] == 2 * second[1]
    heads = arguments.get("num_attention_heads")
    qkv, output = inside.get("self_attention.linear_qkv.weight"), inside.get("self_attention.linear_proj.weight")
    if isinstance(heads, int) and qkv and output and heads and (output[1] * sizes["tp"]) % heads == 0:
        width = output[1] * sizes["tp"] // heads
        groups = (qkv[0] * sizes["tp"] // width - heads) // 2
        shown["kv_channels"] = width
        if groups != heads:
            shown["group_query_attention"], shown["num_query_groups"] = True, groups
    shown["seq_length"] = arguments.get("max_position_embeddings") or shown.get("max_position_embeddings")
    result = {**{name: value for name, value in shown.items() if value is not None}}
    result.update({name: value for name, value in arguments.items() if value is not None or name not in result})
    return result


def true_vocabulary(arguments):
    """Number of vocabulary rows that are no padding, or None where the arguments do not say it."""
    size, padded = arguments.get("vocab_size"), arguments.get("padded_vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return padded if isinstance(padded, int) else None
    rows = true_vocab_size(size, arguments.get("vocab_extra_ids") or 0, arguments.get("tokenizer_type"))
    return min(rows, padded) if isinstance(padded, int) else rows
