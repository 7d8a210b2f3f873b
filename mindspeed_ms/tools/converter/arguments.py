"""Arguments of `convert_ckpt.py`: the flags of MindSpeed-LLM's two converters and of upstream's, as a Conversion."""

import argparse
import os

from mindspeed_ms.core.dist_checkpointing.by_tensor import default_workers
from mindspeed_ms.models.families import families
from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tools.converter import effects
from mindspeed_ms.tools.converter.conversion import Conversion
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.flags import (
    IGNORED,
    IGNORED_WITHOUT_VALUE,
    REFUSED,
    REFUSED_WITHOUT_VALUE,
    WITHOUT_TORCH_DIST,
)
from mindspeed_ms.tools.converter.sides import EXPERTS, GGUF, HUGGING_FACE, MEGATRON, NATIVE, UPSTREAM, WIDE_NAMES

_SOURCES = {"hf": HUGGING_FACE, "mg": MEGATRON, "optim": MEGATRON, "native": NATIVE, "ckpt": UPSTREAM, "gguf": GGUF}
_TARGETS = {"hf": HUGGING_FACE, "mg": MEGATRON, "native": NATIVE, "ckpt": UPSTREAM, "safetensors": UPSTREAM}
_SOURCE_SIZES = ("tensor", "pipeline", "expert")
_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConversionError(message)


def _positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer above 0")
    return int(text)


def _not_negative(text):
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected an integer that is not negative")
    return int(text)


def _gigabytes(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def _counts(text):
    """Integers with commas between them."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers with commas between them")
    return [int(part) for part in parts]


def argument_parser(form=""):
    """Build the argparse.ArgumentParser; it raises ConversionError instead of ending the process.

    Args:
        form (str): "pt2ckpt" or "ckpt2pt" for upstream's two converters, whose `--megatron-path` is a checkpoint; ""
            for MindSpeed-LLM's, where it is a folder of code.
    """
    parser = _Parser(
        prog=f"convert_{form or 'ckpt'}.py", allow_abbrev=False, description="Convert a checkpoint: weights, and the optimizer."
    )
    if form:
        _add_upstream(parser)
    else:
        _add_sides(parser.add_argument_group("source and target"))
        _add_layout(parser.add_argument_group("layout of the target"))
        _add_source(parser.add_argument_group("layout of the source, which its files say"))
        _add_model(parser.add_argument_group("model"))
    group = parser.add_argument_group("how")
    group.add_argument("--dry-run", action="store_true", help="print the plan as a table and write nothing")
    group.add_argument(
        "--workers",
        type=_positive,
        default=default_workers(),
        metavar="N",
        help="threads; memory holds a tensor for each (default: the cores, at most 4)",
    )
    group.add_argument("--verify", action="store_true", help="read the result again and compare it with the source")
    for name in IGNORED:
        how = {"action": "store_true"} if name in IGNORED_WITHOUT_VALUE else {"nargs": "+"}
        parser.add_argument(_flag(name), **how, default=None, help=argparse.SUPPRESS)
    if not form:
        parser.add_argument("--megatron-path", default=None, help=argparse.SUPPRESS)
        for name in REFUSED:
            how = {"action": "store_true"} if name in REFUSED_WITHOUT_VALUE else {"nargs": "+"}
            parser.add_argument(_flag(name), **how, default=None, help=argparse.SUPPRESS)
    return parser


def _flag(name):
    # upstream spells this one with an underscore
    return "--process_timeout" if name == "process_timeout" else f"--{name.replace('_', '-')}"


def _add_sides(group):
    group.add_argument("--load-dir", required=True, metavar="FOLDER", help="the checkpoint to convert")
    group.add_argument("--save-dir", required=True, metavar="FOLDER", help="new folder for the result")
    group.add_argument(
        "--load-model-type", choices=tuple(_SOURCES), help="what --load-dir is (default: as its files say); optim: mg"
    )
    group.add_argument("--save-model-type", choices=tuple(_TARGETS), default="mg", help="what is written (default mg)")
    group.add_argument("--iteration", type=_not_negative, metavar="N", help="which checkpoint of a folder (default: newest)")
    group.add_argument("--lora-load", metavar="FOLDER", help="adapters (a run's, or of PEFT) to merge into the weights")
    group.add_argument("--no-save-optim", action="store_true", help="leave the optimizer's state out")
    group.add_argument("--config", metavar="YAML", help="the model, for files that upstream wrote")
    group.add_argument("--hf-cfg-dir", metavar="FOLDER", help="folder of the model's config.json and tokenizer, for hf")
    group.add_argument("--max-file-size", type=_gigabytes, metavar="GB", help="of each file for hf (default 5)")
    group.add_argument(
        "--ckpt-format",
        "--save-ckpt-format",
        choices=("torch", "torch_dist"),
        help="Megatron's format of what is written as mg (default torch)",
    )
    group.add_argument("--save-to-legacy", action="store_true", help="Megatron's names before core")
    group.add_argument("--load-from-legacy", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--use-mcore-models", action="store_true", help="Megatron core's names (default)")


def _add_layout(group):
    group.add_argument("--target-tensor-parallel-size", type=_positive, metavar="N")
    group.add_argument("--target-pipeline-parallel-size", type=_positive, metavar="N")
    group.add_argument("--target-expert-parallel-size", type=_positive, metavar="N")
    group.add_argument("--expert-tensor-parallel-size", type=_positive, metavar="N")
    group.add_argument("--target-data-parallel-size", type=_positive, metavar="N", help="for the optimizer's state")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=_positive, metavar="N")
    group.add_argument("--num-layer-list", type=_counts, metavar="N,N,...", help="layers of each stage")
    group.add_argument("--noop-layers", type=_counts, metavar="N,N,...", help="places of layers without weights")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=_positive,
        metavar="N",
        help="pad the vocabulary to a multiple of N x tensor ranks",
    )


def _add_source(group):
    for name in _SOURCE_SIZES:
        group.add_argument(
            f"--source-{name}-parallel-size", type=_positive, metavar="N", help=f"{name}-parallel ranks, compared"
        )


def _add_model(group):
    group.add_argument("--model-type", default="GPT", choices=("GPT", "BERT"))
    group.add_argument("--model-type-hf", metavar="NAME", help="family of the model (default: as config.json says)")
    group.add_argument("--params-dtype", choices=tuple(_DTYPES), help="convert the weights (default: as they are)")
    group.add_argument("--tokenizer-model", metavar="FILE", help="file of the tokenizer, copied to the result")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a tokenizer, copied to the result")
    group.add_argument("--true-vocab-size", type=_positive, metavar="N", help="rows of the vocabulary that are no padding")
    group.add_argument(
        "--experts",
        choices=tuple(EXPERTS),
        help="local_experts.N of SequentialMLP, weight1/weight2 of GroupedMLP, or Transformer Engine's linear_fc1.weightN "
        "(default: as the source)",
    )
    group.add_argument("--moe-grouped-gemm", action="store_true", help="the same as --experts grouped")
    group.add_argument("--add-qkv-bias", action="store_true", help="the model has biases on query, key and value")
    group.add_argument("--add-dense-bias", action="store_true", help="the model has a bias on the output of attention")
    group.add_argument("--num-layers", type=_positive, metavar="N", help="layers of the model, compared")
    group.add_argument("--first-k-dense-replace", type=_not_negative, metavar="N", help="dense layers, compared")
    group.add_argument("--mtp-num-layers", type=_not_negative, metavar="N", help="layers for further tokens, compared")


def _add_upstream(parser):
    parser.add_argument("--megatron-path", required=True, metavar="FOLDER", help="Megatron's checkpoint")
    parser.add_argument("--ms-path", required=True, metavar="FOLDER", help="upstream's folder of rank_* folders")
    parser.add_argument("--param-map-path", metavar="FOLDER", help=argparse.SUPPRESS)
    for name in ("tp", "pp", "dp", "cp", "vpp"):
        parser.add_argument(f"--{name}-size", type=_positive, default=1, metavar="N")
    parser.add_argument("--stage-list", type=_positive, nargs="+", metavar="N", help="layers of each stage")
    parser.add_argument("--noop", type=_not_negative, nargs="*", default=[], help="places of layers without weights")
    parser.add_argument("--num-layers", type=_positive, metavar="N")
    parser.add_argument("--convert-param-only", action="store_true", help="leave the optimizer's state out")
    parser.add_argument("--file-prefix", default="network", metavar="NAME")
    parser.add_argument("--format", choices=("ckpt", "safetensors"), default="ckpt")
    parser.add_argument("--src-model-format", choices=("ckpt", "safetensors"), help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="YAML", help="the model, for files that upstream wrote")


def parse(words, form=""):
    """The Conversion that a command line asks for.

    Args:
        words (list[str]): the command line.
        form (str): see `argument_parser`.

    Raises:
        ConversionError: unknown flags (with a suggestion), missing or contradicting ones.
    """
    parser = argument_parser(form)
    arguments, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")] or rest
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConversionError(f"unknown argument {unknown[0]}.{did_you_mean(unknown[0].partition('=')[0], flags)}")
    given = {name for name, value in vars(arguments).items() if value not in (None, False)}
    for name in REFUSED:
        if name in given:
            raise ConversionError(f"{_flag(name)}: {REFUSED[name]}")
    notes = [f"{_flag(name)} has no effect: {IGNORED[name]}" for name in IGNORED if name in given]
    if form:
        return _of_upstream(arguments, form, notes)
    if "megatron_path" in given:
        notes.append("--megatron-path has no effect: no code of Megatron is needed")
    return _of_mindspeed(arguments, notes)


def _of_mindspeed(arguments, notes):
    if arguments.model_type != "GPT":
        raise ConversionError("--model-type BERT: there are decoder-only models here. Expected GPT.")
    for name in ("load_dir", "save_dir"):
        if not getattr(arguments, name):
            raise ConversionError(f"{_flag(name)} is empty: expected a folder.")
    if arguments.expert_tensor_parallel_size not in (None, 1, arguments.target_tensor_parallel_size or 1):
        raise ConversionError("--expert-tensor-parallel-size: expected 1 or the tensor parallel size.")
    _check_family(arguments.model_type_hf)
    _check_format(arguments)
    for name in ("tokenizer_model", "vocab_file"):
        path = getattr(arguments, name)
        if path is not None and not os.path.exists(path):
            raise ConversionError(f"{_flag(name)} {path} does not exist.")
        if path is not None and not os.path.isfile(path):
            raise ConversionError(f"{_flag(name)} {path}: expected a file, such as tokenizer.json. A folder is --hf-cfg-dir.")
    tp, pp = arguments.target_tensor_parallel_size or 1, arguments.target_pipeline_parallel_size or 1
    if arguments.num_layer_list and len(arguments.num_layer_list) != pp:
        raise ConversionError(
            f"--num-layer-list has {len(arguments.num_layer_list)} numbers: expected one for each of the {pp} stages "
            "(--target-pipeline-parallel-size)."
        )
    if arguments.num_layer_list and arguments.num_layers_per_virtual_pipeline_stage:
        raise ConversionError("--num-layer-list and --num-layers-per-virtual-pipeline-stage exclude each other.")
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": arguments.target_expert_parallel_size,
        "expert_tensor_parallel_size": arguments.expert_tensor_parallel_size,
        "num_layers_per_virtual_pipeline_stage": arguments.num_layers_per_virtual_pipeline_stage,
        "num_layer_list": arguments.num_layer_list,
        "noop_layers": arguments.noop_layers,
    }
    expected = {
        "--add-qkv-bias": ("model_config.qkv_has_bias", arguments.add_qkv_bias or None),
        "--add-dense-bias": ("model_config.out_proj_has_bias", arguments.add_dense_bias or None),
        "--num-layers": ("model_config.num_layers", arguments.num_layers),
        "--first-k-dense-replace": ("moe_config.first_k_dense_replace", arguments.first_k_dense_replace),
        "--mtp-num-layers": ("model_config.mtp_num_layers", arguments.mtp_num_layers),
    }
    target = _TARGETS[arguments.save_model_type]
    source = _SOURCES.get(arguments.load_model_type)
    notes += effects.notes_of(arguments, target)
    return Conversion(
        source=source,
        target=target,
        load_dir=arguments.load_dir,
        save_dir=arguments.save_dir,
        iteration=arguments.iteration,
        adapter=arguments.lora_load,
        parallel={name: value for name, value in parallel.items() if value is not None},
        data_parallel_size=arguments.target_data_parallel_size,
        with_optimizer=not arguments.no_save_optim,
        params_dtype=_DTYPES.get(arguments.params_dtype),
        vocab_multiple=arguments.make_vocab_size_divisible_by,
        true_vocab_size=arguments.true_vocab_size,
        family=arguments.model_type_hf,
        model_folder=arguments.hf_cfg_dir,
        tokenizer=tuple(path for path in (arguments.tokenizer_model, arguments.vocab_file) if path is not None),
        expected={flag: pair for flag, pair in expected.items() if pair[1] is not None},
        source_layout={
            f"--source-{name}-parallel-size": (f"{name}_model_parallel_size", size)
            for name in _SOURCE_SIZES
            if (size := getattr(arguments, f"source_{name}_parallel_size")) is not None
        },
        config=arguments.config,
        experts=effects.expert_form(arguments),
        legacy_names=arguments.save_to_legacy,
        ckpt_format=arguments.ckpt_format or "torch",
        upstream_format="safetensors" if arguments.save_model_type == "safetensors" else "ckpt",
        most_bytes=int((arguments.max_file_size or 5.0) * 10**9),
        workers=arguments.workers,
        verify=arguments.verify,
        dry_run=arguments.dry_run,
        flags={
            "tensor_model_parallel_size": "--target-tensor-parallel-size",
            "pipeline_model_parallel_size": "--target-pipeline-parallel-size",
            "expert_model_parallel_size": "--target-expert-parallel-size",
            "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
            "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
            "num_layer_list": "--num-layer-list",
            "noop_layers": "--noop-layers",
            "data_parallel_size": "--target-data-parallel-size",
        },
        notes=tuple(notes),
    )


def _check_format(arguments):
    """ConversionError for a format of Megatron's that the target has none of."""
    if arguments.ckpt_format is not None and _TARGETS[arguments.save_model_type] != MEGATRON:
        raise ConversionError(f"--ckpt-format {arguments.ckpt_format}: it is Megatron's, expected with --save-model-type mg.")
    if arguments.ckpt_format == "torch_dist":
        for name, reason in WITHOUT_TORCH_DIST.items():
            if getattr(arguments, name):
                raise ConversionError(f"--ckpt-format torch_dist: {reason} Leave {_flag(name)} out.")


def _check_family(name):
    known = {*families(), *WIDE_NAMES, *(family.replace("_", "-") for family in families())}
    if name is not None and name not in known:
        raise ConversionError(
            f"--model-type-hf {name}: expected one of {', '.join(sorted(known))}.{did_you_mean(name, known)} "
            "docs/new-model-family.md says how to add a family."
        )


def _of_upstream(arguments, form, notes):
    per_stage = None
    if arguments.vpp_size > 1:
        if not arguments.num_layers or arguments.num_layers % (arguments.pp_size * arguments.vpp_size):
            raise ConversionError("--vpp-size needs --num-layers, divisible by --pp-size x --vpp-size.")
        per_stage = arguments.num_layers // (arguments.pp_size * arguments.vpp_size)
    if arguments.param_map_path is not None:
        notes.append("--param-map-path has no effect: places in the optimizer's buffers are computed")
    if arguments.cp_size > 1:
        notes.append("--cp-size has no effect: context-parallel ranks hold the same weights")
    if arguments.src_model_format is not None:
        notes.append("--src-model-format has no effect: files are recognised by what they hold")
    if form == "ckpt2pt" and (arguments.file_prefix, arguments.format) != ("network", "ckpt"):
        notes.append("--file-prefix and --format have no effect: files are recognised by what they hold")
    if form == "ckpt2pt" and arguments.dp_size > 1:
        notes.append("--dp-size has no effect: Megatron's files are the same for all sizes")
    parallel = {
        "tensor_model_parallel_size": arguments.tp_size,
        "pipeline_model_parallel_size": arguments.pp_size,
        "num_layers_per_virtual_pipeline_stage": per_stage,
        "num_layer_list": arguments.stage_list,
        "noop_layers": arguments.noop or None,
    }
    to_upstream = form == "pt2ckpt"
    return Conversion(
        source=MEGATRON if to_upstream else None,
        target=UPSTREAM if to_upstream else MEGATRON,
        load_dir=arguments.megatron_path if to_upstream else arguments.ms_path,
        save_dir=arguments.ms_path if to_upstream else arguments.megatron_path,
        parallel={name: value for name, value in parallel.items() if value is not None},
        data_parallel_size=arguments.dp_size,
        with_optimizer=not arguments.convert_param_only,
        expected={"--num-layers": ("model_config.num_layers", arguments.num_layers)} if arguments.num_layers else {},
        config=arguments.config,
        upstream_format=arguments.format,
        upstream_prefix=arguments.file_prefix,
        workers=arguments.workers,
        verify=arguments.verify,
        dry_run=arguments.dry_run,
        flags={
            "tensor_model_parallel_size": "--tp-size",
            "pipeline_model_parallel_size": "--pp-size",
            "num_layers_per_virtual_pipeline_stage": "--vpp-size",
            "num_layer_list": "--stage-list",
            "noop_layers": "--noop",
            "data_parallel_size": "--dp-size",
        },
        notes=tuple(notes),
    )
