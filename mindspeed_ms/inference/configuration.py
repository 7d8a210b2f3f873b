"""Configuration of a model for inference: the checkpoint's, in a layout, with the flags of training that bear on it."""

import copy

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, require_available
from mindspeed_ms.config.argument_table import row_of_flag
from mindspeed_ms.config.checkpoint_tokenizer import NAMES
from mindspeed_ms.config.errors import WarningNotice
from mindspeed_ms.config.row import IGNORED

_DTYPES = {"float32": (), "bfloat16": ("--bf16",), "float16": ("--fp16",)}
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LENGTH = "--seq-length"
_TOKENIZER = (*NAMES, "use_fast_tokenizer", "vocab_size", "vocab_extra_ids")
_OF_A_RUN = ("load_strict", "fp16", "bf16", "log_level", "device_target")
_OF_RANKS = ("noop_layers", "communication_backend", "distributed_timeout_minutes")
_OLD_NAMES = ("batch_size", "warmup")  # of settings of training
_OF_TRAINING_ALONE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "moe_layer_recompute"),
    *("loss_chunk_size", "mlp_chunk_size", "fp16_lm_cross_entropy", "label_smoothing", "attention_dropout", "hidden_dropout"),
    *("init_method", "init_method_std", "embedding_init_std", "scaled_output_init", "bias_init", "embedding_init_dtype"),
    *("moe_router_bias_update_rate", "moe_input_jitter_eps"),
)


class LoadError(ValueError):
    """Error: an argument of loading that cannot be used."""


def configuration(place, manifest, sizes, dtype, length, flags):
    """AllConfig of a checkpoint's model, and what is not used as it was typed.

    Args:
        place (str), manifest (Manifest): of the checkpoint, without adapters.
        sizes (dict): parallel sizes by name; None: not given.
        dtype (Optional[str]), flags (sequence[str]): as of `inference.loading.load`.
        length (int): context.

    Returns:
        (AllConfig, list[str]): and warnings, one of them about all settings that have no effect

    Raises:
        ConfigError: the first problem alone, since the others often follow from it.
        LoadError: an unknown dtype, a layout that inference does not have.
    """
    tp, ep, expert_tp = (sizes[f"{name}_parallel_size"] for name in ("tensor_model", "expert_model", "expert_tensor"))
    words = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", sizes["pipeline_model_parallel_size"]]
    if ep > 1 or expert_tp is not None:
        words += ["--expert-model-parallel-size", ep, "--expert-tensor-parallel-size", expert_tp or tp]
    # training cuts the sequence where experts meet tensor parallelism, inference does not: it is switched off behind the checks
    cuts_sequence = tp > 1 and (manifest.args.get("moe_config") or {}).get("num_experts", 1) > 1
    known_length = -(-length // tp) * tp if cuts_sequence else length
    words += ["--sequence-parallel"] if cuts_sequence else []
    words += ["--use-checkpoint-args", "--load", place, _LENGTH, known_length, "--micro-batch-size", 1, "--finetune"]
    words += [*_dtype_flags(dtype, manifest.args["model_config"]), "--train-iters", 1, "--lr", 1, "--use-lora", "False"]
    if (expert_tp or 1) > 1 and (manifest.args.get("moe_config") or {}).get("num_experts", 1) == 1:
        raise LoadError(f"--expert-tensor-parallel-size is {expert_tp}: the model has no experts, leave it out.")
    arguments, idle = _with_typed([str(word) for word in words], [str(word) for word in flags])
    try:
        config = init_configs_from_args(arguments)
        require_available(config)
    except ConfigError as error:
        raise ConfigError(error.problems[0]) from None
    config.parallel_config.fill(sequence_parallel=False)
    config.model_config.fill(mtp_num_layers=None)  # decoding has no use for them
    ranks = config.parallel_config.context_parallel_size
    if ranks > 1:
        raise LoadError(f"--context-parallel-size is {ranks}: inference cuts no sequence over ranks, leave it out.")
    warnings = [notice for notice in config.notices if isinstance(notice, WarningNotice) and not notice.startswith(_LENGTH)]
    if idle:
        warnings.append(f"without effect on inference: {', '.join(idle)}")
    return config, warnings


def _with_typed(words, flags):
    """(Namespace of words and of those flags that bear on inference, the other flags as they were typed)."""
    parser = argument_parser()
    own = parser.parse_args(words)
    both = parser.parse_args(flags, copy.deepcopy(own))
    typed = parser.parse_args(flags).typed_flags
    idle = {name: flag for name, flag in typed.items() if not _has_effect(row_of_flag(flag))}
    for name in idle:
        setattr(both, name, getattr(own, name))
        both.typed_flags.pop(name)
        if name in own.typed_flags:
            both.typed_flags[name] = own.typed_flags[name]
    both.typed_options = list(both.typed_flags)
    both.typed_again = [flag for flag in both.typed_again if flag not in idle.values()]
    return both, list(idle.values())


def _has_effect(row):
    """Whether an option matters to inference: model, layout, tokenizer. One that nothing has is refused by its own check."""
    if row is None or not row.path:
        return row is None or (row.status != IGNORED and row.name not in _OLD_NAMES)
    section, name = row.path.split(".")[:2]
    return {
        "model_config": name not in _OF_TRAINING_ALONE and row.status != IGNORED,
        "moe_config": name not in _OF_TRAINING_ALONE and row.seen not in ("optimizer", "log"),
        "parallel_config": row.seen == "layout" or name in _OF_RANKS,
        "dataset_config": name in _TOKENIZER,
        "training_config": name in _OF_A_RUN,
    }.get(section, False)


def _dtype_flags(dtype, saved):
    name = _SHORT_DTYPES.get(dtype, dtype) or saved.get("compute_dtype") or saved.get("params_dtype") or "float32"
    if name not in _DTYPES:
        raise LoadError(f"dtype is {dtype!r}: expected one of {', '.join(_DTYPES)} (or fp32, bf16, fp16).")
    return _DTYPES[name]
