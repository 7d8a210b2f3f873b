"""Flags of the converter that cannot take effect: refused where the result would be another than asked for, else noted."""

import os

from mindspeed_ms.core.dist_checkpointing.megatron import names
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.model_folder import check_given
from mindspeed_ms.tools.converter.sides import EXPERTS, GGUF, HUGGING_FACE, MEGATRON, NATIVE, UPSTREAM, accepts_family

_LAYOUT = (
    *("target_tensor_parallel_size", "target_pipeline_parallel_size", "target_expert_parallel_size"),
    *("expert_tensor_parallel_size", "target_data_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("num_layer_list", "noop_layers", "make_vocab_size_divisible_by"),
)
# target -> flags whose result it cannot have, and why
_REFUSED = {
    HUGGING_FACE: (
        (_LAYOUT[:-1], "a Hugging Face folder has no layout"),
        (_LAYOUT[-1:], "a Hugging Face folder has as many rows of the vocabulary as its config.json says"),
        (("moe_grouped_gemm", "experts"), "a Hugging Face folder has its experts one by one"),
        (("save_to_legacy",), "only Megatron's files have such names"),
    ),
    NATIVE: ((("save_to_legacy",), "only Megatron's files have such names"), (("max_file_size",), "it is for hf")),
    UPSTREAM: ((("save_to_legacy",), "only Megatron's files have such names"), (("max_file_size",), "it is for hf")),
    MEGATRON: ((("max_file_size",), "it is for hf"),),
}
# target -> flags without effect on it, and why
_NOTED = {
    HUGGING_FACE: (
        (("use_mcore_models",), "a Hugging Face folder has Hugging Face's names"),
        (("no_save_optim",), "a Hugging Face folder holds no optimizer"),
    ),
    NATIVE: ((("use_mcore_models",), "our files have our names"),),
    UPSTREAM: ((("use_mcore_models",), "upstream's files have upstream's names"),),
    MEGATRON: ((("target_data_parallel_size",), "Megatron's files are the same for all sizes"),),
}
_OF_GGUF = (
    *(
        "model_type_hf",
        "iteration",
        "config",
        "hf_cfg_dir",
        "tokenizer_model",
        "vocab_file",
        "true_vocab_size",
        "max_file_size",
    ),
    *("source_tensor_parallel_size", "source_pipeline_parallel_size", "source_expert_parallel_size"),
    *("add_qkv_bias", "add_dense_bias", "num_layers", "first_k_dense_replace", "mtp_num_layers", "verify", "no_save_optim"),
)


def _flag(name):
    return f"--{name.replace('_', '-')}"


def notes_of(arguments, target):
    """Notes about flags that do nothing for a target.

    Args:
        arguments (argparse.Namespace): of MindSpeed-LLM's form of the command line.
        target (str): side that is written.

    Raises:
        ConversionError: the result would not be what a flag asks for.
    """
    notes = []
    for table, refuses in ((_REFUSED, True), (_NOTED, False)):
        for flags, reason in table[target]:
            for name in flags:
                value = getattr(arguments, name)
                if value in (None, False) or (name in _LAYOUT and value == 1) or value == "sequential":
                    continue
                if refuses:
                    text = "" if value is True else f" {_text(value)}"
                    raise ConversionError(
                        f"{_flag(name)}{text} (--save-model-type {arguments.save_model_type}): {reason}. Leave it out."
                    )
                notes.append(f"{_flag(name)} has no effect: {reason}")
    if arguments.use_mcore_models and arguments.save_to_legacy:
        raise ConversionError("--use-mcore-models and --save-to-legacy exclude each other.")
    if arguments.load_from_legacy:
        notes.append("--load-from-legacy has no effect: the names in the files say it")
    if arguments.dry_run and arguments.verify:
        notes.append("--verify has no effect: nothing is written (--dry-run)")
    if arguments.load_dir.endswith(".gguf") or arguments.load_model_type == GGUF:
        _check_gguf(arguments)
    return notes


def expert_form(arguments):
    """Form of the experts that is asked for, one of `names.EXPERT_FORMS`; None: as in the source.

    Raises:
        ConversionError: flags that contradict each other, or a form that the target does not have.
    """
    if arguments.moe_grouped_gemm and arguments.experts not in (None, "grouped"):
        raise ConversionError(f"--experts {arguments.experts} and --moe-grouped-gemm, which means grouped: leave one out.")
    asked = names.GROUPED if arguments.moe_grouped_gemm else EXPERTS.get(arguments.experts)
    if asked not in (None, names.SEQUENTIAL) and arguments.save_to_legacy:
        raise ConversionError("--save-to-legacy: legacy models have their experts one by one. Leave it or --experts out.")
    if asked == names.ENGINE_GROUPED and arguments.save_model_type != "mg":
        raise ConversionError("--experts te-grouped: only Megatron's files have it (--save-model-type mg).")
    return asked


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_gguf(arguments):
    """A GGUF file says all of its model; its values become float32."""
    given = [name for name in _OF_GGUF if getattr(arguments, name) not in (None, False)]
    if arguments.params_dtype not in (None, "fp32", "float32"):
        given.append("params_dtype")
    if given:
        raise ConversionError(
            f"{_flag(given[0])}: a GGUF file is converted as it is, to float32 and one file. Leave it out, and give it with "
            "the next conversion from the Hugging Face folder."
        )


def check_source(conversion, source):
    """Notes about flags that do nothing for an opened source.

    Raises:
        ConversionError: the result would not be what a flag asks for.
    """
    notes, is_hugging_face = [], source.kind == HUGGING_FACE
    if is_hugging_face and conversion.iteration is not None:
        raise ConversionError(f"--iteration {conversion.iteration}: {conversion.load_dir} holds one model, of no iteration.")
    if is_hugging_face and conversion.config is not None:
        raise ConversionError(
            f"--config {conversion.config}: {conversion.load_dir} has a config.json of its own. Leave it out."
        )
    rows = source.reader.tensor(WORD_EMBEDDINGS).shape[0]
    if (conversion.true_vocab_size or 0) > rows:
        raise ConversionError(
            f"--true-vocab-size {conversion.true_vocab_size}: the vocabulary of {conversion.load_dir} has {rows} rows. "
            "Expected at most as many."
        )
    asked, cut = map(conversion.parallel.get, ("expert_tensor_parallel_size", "tensor_model_parallel_size"))
    if source.config.moe_config.num_experts == 1 and asked not in (None, cut):
        raise ConversionError(f"--expert-tensor-parallel-size {asked}: {conversion.load_dir} has no experts. Leave it out.")
    if conversion.model_folder is not None and conversion.target != HUGGING_FACE:
        check_given(conversion, source)
    family = source.family_name
    if family is not None and not accepts_family(conversion.family, family):
        raise ConversionError(
            f"--model-type-hf {conversion.family}: {os.path.join(source.model_folder, 'config.json')} says {family}. Leave the "
            "flag out, or give that name."
        )
    if conversion.family and family is None and conversion.target != HUGGING_FACE:
        notes.append(f"--model-type-hf has no effect: {conversion.load_dir} says its model, but no family")
    has_optimizer = bool(source.reader.manifest.states.get("optimizer"))
    writes_optimizer = has_optimizer and conversion.with_optimizer
    if (conversion.data_parallel_size or 1) > 1 and conversion.target == NATIVE and not writes_optimizer:
        notes.append("--target-data-parallel-size has no effect: it cuts the optimizer's state, and none is written")
    if not has_optimizer and not conversion.with_optimizer:
        notes.append(f"--no-save-optim has no effect: {conversion.load_dir} holds no optimizer's state")
    return notes
