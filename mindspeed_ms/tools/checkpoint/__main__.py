"""Command line of the checkpoint tool: `python -m mindspeed_ms.tools.checkpoint COMMAND PATH ...`.

Exit codes: 0 done, 1 different or damaged, 2 impossible, 141 the reader of the output (`| head`) had enough.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys

from mindspeed_ms.config import ConfigError, init_configs_from_dict, init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing.by_tensor import default_workers
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tools.checkpoint import diff, inspect, rewrite, verify
from mindspeed_ms.tools.checkpoint.source import all_checkpoints, open_checkpoint
from mindspeed_ms.tools.checkpoint.target_layout import layout_cut

_MODEL_SECTIONS = ("model_config", "parallel_config", "moe_config")
_CUTS_OF_LAYERS = (
    "num_layer_list",
    "num_layers_per_virtual_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")


def _not_negative(text):
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number that is not negative")
    return value


def _positive(text):
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def parser():
    """Build the argparse.ArgumentParser of the command line."""
    result = SuggestingParser(
        prog="python -m mindspeed_ms.tools.checkpoint",
        description="Look at checkpoints, compare and rewrite them; needs no device.",
    )
    commands = result.add_subparsers(dest="command", required=True)
    make = _command(commands, "inspect", "show iteration, layout, tensors, counters and who saved what")
    make.add_argument("--json", action="store_true", help="print one JSON object")
    make.add_argument("--slices", action="store_true", help="show every part of every tensor")
    _command(commands, "verify", "read everything and compare check sums; of a run's folder: all its checkpoints")
    make = commands.add_parser("diff", help="compare two checkpoints of any layouts tensor by tensor")
    make.add_argument("first")
    make.add_argument("second")
    make.add_argument("--iteration", type=int, help="of both, if they are folders of runs")
    make.add_argument("--config", help="yaml of the model, for files that upstream wrote")
    make.add_argument("--rtol", type=_not_negative, default=0.0, help="relative difference allowed (default 0: equal bits)")
    make.add_argument("--atol", type=_not_negative, default=0.0, help="absolute difference that is allowed")
    make.add_argument("--weights-only", action="store_true", help="neither optimizer states nor counters")
    make.add_argument("--ignore-dtype", action="store_true", help="only values count")
    make = _command(commands, "reshard", "cut the files anew for another layout; training loads any layout without it")
    make.add_argument("output", help="folder for the new checkpoint")
    for name in _SIZES:
        make.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the new layout")
    make.add_argument(
        "--data-parallel-size", type=int, help="ranks that share the optimizer's state (default: as few as the layout needs)"
    )
    make = _command(commands, "merge", "join all parts into whole tensors")
    make.add_argument("output", help="folder for the new checkpoint, or for the weights")
    make.add_argument("--weights-only", action="store_true", help="plain safetensors files with an index, for other programs")
    make.add_argument("--max-file-size", type=_positive, default=5.0, metavar="GB", help="of each file (default 5)")
    return result


def _command(commands, name, text):
    made = commands.add_parser(name, help=text)
    made.add_argument("path", help="a checkpoint (output/iter_0000100, or a file in it), or the folder of a run: its newest")
    made.add_argument("--iteration", type=int, help="which one of a run")
    made.add_argument("--config", help="yaml of the model, for files that upstream wrote; for reshard also of the new layout")
    return made


def _inspect(arguments):
    with open_checkpoint(arguments.path, arguments.iteration, arguments.config) as reader:
        description = inspect.describe(reader, arguments.slices)
    print(json.dumps(description, indent=1) if arguments.json else "\n".join(inspect.lines(description)))
    return 0


def _verify(arguments):
    damaged = 0
    for path in all_checkpoints(arguments.path, arguments.iteration):
        try:
            with open_checkpoint(path, arguments.iteration, arguments.config) as reader:
                problems = verify.problems_of(reader)
        except CheckpointError as error:
            problems = [str(error)]
        print(f"{path}: {'damaged' if problems else 'good'}")
        for problem in problems:
            print(f"  {problem}")
        damaged += bool(problems)
    return 1 if damaged else 0


def _diff(arguments):
    with (
        open_checkpoint(arguments.first, arguments.iteration, arguments.config) as first,
        open_checkpoint(arguments.second, arguments.iteration, arguments.config) as second,
    ):
        count = 0
        for difference in diff.differences(
            first, second, arguments.rtol, arguments.atol, arguments.weights_only, arguments.ignore_dtype
        ):
            print(f"{difference.key}: {difference.text}")
            count += 1
        print(f"{first.folder} and {second.folder}: {count or 'no'} difference{'' if count == 1 else 's'}")
    return 1 if count else 0


def _reshard(arguments):
    with open_checkpoint(arguments.path, arguments.iteration, arguments.config) as reader:
        try:
            cut = layout_cut(reader.manifest, _target_config(arguments, reader.manifest), arguments.data_parallel_size)
        except (ConfigError, LayoutError) as error:
            raise CheckpointError(_in_flags(str(error), arguments)) from error
        with rewrite.CheckedSource(reader) as check:
            path = rewrite.write_checkpoint(reader, arguments.output, cut, default_workers(), check)
        print(f"wrote {path} for {len(cut)} ranks")
    return 0


def _in_flags(text, arguments):
    """Text of an error about the layout with the flags that were typed in place of the settings' names."""
    for name in (*_SIZES, "data_parallel_size"):
        if getattr(arguments, name) is not None:
            text = re.sub(rf"(parallel_config\.)?\b(?<!-){name}\b", f"--{name.replace('_', '-')}", text)
    return text


def _target_config(arguments, manifest):
    """AllConfig of the new layout. Raises CheckpointError: the checkpoint has no configuration and none is given."""
    if arguments.config:
        values = init_configs_from_yaml(arguments.config).to_dict()
    elif manifest.args:
        values = manifest.args
    else:
        raise CheckpointError("the checkpoint holds no configuration: give one with --config.")
    sizes = {name: getattr(arguments, name) for name in _SIZES if getattr(arguments, name) is not None}
    values = {name: values[name] for name in _MODEL_SECTIONS if values.get(name)}
    values.setdefault("parallel_config", {})
    if sizes:
        # what cut the layers for the old sizes does not fit the new ones
        kept = {name: value for name, value in values["parallel_config"].items() if name not in _CUTS_OF_LAYERS}
        new = {**kept, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **sizes}
        cuts_sequence = new.get("sequence_parallel", False) and new["tensor_model_parallel_size"] > 1
        values["parallel_config"] = {**new, "sequence_parallel": cuts_sequence}
    values["parallel_config"] = {**values["parallel_config"], "world_size": None}
    return init_configs_from_dict(values)


def _merge(arguments):
    most_bytes = int(arguments.max_file_size * rewrite.GIGABYTE)
    with open_checkpoint(arguments.path, arguments.iteration, arguments.config) as reader:
        with rewrite.CheckedSource(reader) as check:
            if arguments.weights_only:
                names = rewrite.write_weights(reader, arguments.output, most_bytes, default_workers(), check)
                text = f"wrote the weights of {reader.folder} to {arguments.output}: {len(names)} files"
            else:
                cut = rewrite.whole_cut(reader.manifest, most_bytes)
                path = rewrite.write_checkpoint(reader, arguments.output, cut, default_workers(), check)
                text = f"wrote {path} in {len(cut)} files"
        print(text)
    return 0


def main(arguments=None):
    """Run a command of the checkpoint tool; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = parser().parse_args(arguments)
    commands = {"inspect": _inspect, "verify": _verify, "diff": _diff, "reshard": _reshard, "merge": _merge}
    try:
        result = commands[arguments.command](arguments)
        sys.stdout.flush()
        return result
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except DamagedCheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (CheckpointError, ConfigError, LayoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
