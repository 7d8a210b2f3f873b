"""Command line for low-rank adapters: `python -m mindspeed_ms.tools.lora inspect|merge|unmerge|export|import ...`.

Needs no device. Exit codes: 0 done, 1 an error that the user can mend.
"""

import os
import sys
from dataclasses import replace

from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest, StoredTensor, whole_slice
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.models import peft_folder
from mindspeed_ms.models.adapter_files import model_of, read_adapters, with_adapters
from mindspeed_ms.models.adapters import lora_config
from mindspeed_ms.models.families.family import family_of
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, model_folder_of, read_json
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tools.converter.arguments import parse
from mindspeed_ms.tools.converter.convert import convert
from mindspeed_ms.tools.converter.errors import ConversionError

PROGRAM = "python -m mindspeed_ms.tools.lora"
_FILE = "adapters.safetensors"


def parser():
    """The argparse.ArgumentParser."""
    result = SuggestingParser(prog=PROGRAM, description="Low-rank adapters: look at, merge, take out, exchange with PEFT.")
    commands = result.add_subparsers(dest="command", required=True)
    make = commands.add_parser("inspect", help="show which cells have adapters, rank and scale")
    make.add_argument("adapter", help="folder of a run or checkpoint with adapters, or of PEFT")
    make.add_argument("--base", metavar="FOLDER", help="base, which a PEFT folder needs")
    for name, text in (("merge", "add adapters to the weights of their base"), ("unmerge", "take merged adapters out again")):
        make = commands.add_parser(name, help=f"{text}; further flags are convert_ckpt.py's")
        make.add_argument("base", help="base (unmerge: merged weights), or a checkpoint with adapters, or of adapters alone")
        make.add_argument("save_dir", help="new folder")
        make.add_argument(
            "--adapter", metavar="FOLDER", help="adapters, if the checkpoint has none", required=name == "unmerge"
        )
    make = commands.add_parser("export", help="write a PEFT folder")
    make.add_argument("adapter", help="folder of a run or checkpoint with adapters")
    make.add_argument("save_dir", help="new folder")
    make.add_argument("--base", metavar="FOLDER", help="base (default: the one that the adapters were trained on)")
    make.add_argument("--hf-cfg-dir", metavar="FOLDER", help="folder with the base's config.json (default: the base's)")
    make = commands.add_parser("import", help="make a checkpoint of adapters alone from a PEFT folder")
    make.add_argument("adapter", help="PEFT folder")
    make.add_argument("save_dir", help="new folder")
    make.add_argument("--base", metavar="FOLDER", required=True, help="base: ours, Megatron's or Hugging Face's")
    return result


def main(words=None):
    """Run the command line `words` (default: this process's); returns the exit status."""
    setup_logging()
    options, others = parser().parse_known_args(words)
    if others and options.command not in ("merge", "unmerge"):
        parser().error(f"unrecognized arguments: {' '.join(others)}")
    try:
        lines = _COMMANDS[options.command](options, others)
    except (CheckpointError, ConversionError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM}: error: {error.strerror or error}: {error.filename}. Nothing was written.", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _inspect(options, others):
    del others

    def model():
        if options.base is None:
            raise CheckpointError(f"{options.adapter} is a PEFT folder, which does not say the model: name it with --base.")
        place, manifest = newest_manifest(options.base)
        return model_of(manifest, place)

    adapters = read_adapters(options.adapter, model)
    count = sum(values.size for values in adapters.tensors.values())
    lines = [f"{options.adapter}: {len(adapters.cells)} adapters, {count:,} parameters, base {adapters.base or 'unknown'}"]
    shapes = {cell: adapters.tensors[f"{cell}.lora_a"].shape for cell in adapters.cells}
    return lines + [f"  {cell}  rank {shapes[cell][0]}  scale {adapters.scale(cell):g}" for cell in adapters.cells]


def _merge(options, others, sign=1):
    words = ["--load-dir", options.base, "--save-dir", options.save_dir, *others]
    if not any(word.split("=")[0] == "--save-model-type" for word in others):
        words += ["--save-model-type", "native"]
    conversion = replace(parse(words), with_optimizer=False, adapter=options.adapter, adapter_sign=sign)
    place, manifest = newest_manifest(options.base, conversion.iteration)
    if with_adapters(place, manifest, options.adapter)[2] is None:
        raise CheckpointError(f"{options.base} has no adapters to merge: name their folder with --adapter.")
    return convert(conversion)


def _unmerge(options, others):
    return _merge(options, others, -1)


def _check_new(path):
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointError(f"{path} exists already: choose a new or empty folder.")


def _export(options, others):
    _check_new(options.save_dir)
    del others
    adapters = read_adapters(options.adapter, None)
    named, folder = options.base or adapters.base, options.hf_cfg_dir
    place, manifest = newest_manifest(named) if named and os.path.isdir(named) else newest_manifest(options.adapter)
    if options.base:
        adapters.check_base({key: one.shape for key, one in manifest.tensors.items()}, manifest.args, place)
    folder = folder or model_folder_of(place) or model_folder_of(newest_manifest(options.adapter)[0])
    if folder is None:
        raise CheckpointError(
            f"{options.adapter}: the family of the base is unknown: name the folder with its {CONFIG_FILE} (--hf-cfg-dir)."
        )
    path = os.path.join(folder, CONFIG_FILE)
    family = family_of(read_json(path), path)
    peft_folder.write(options.save_dir, adapters, family, model_of(manifest, place), os.path.abspath(folder))
    return [f"wrote {len(adapters.cells)} adapters of {adapters.source} as a PEFT folder: {options.save_dir}"]


def _import(options, others):
    _check_new(options.save_dir)
    del others
    place, base = newest_manifest(options.base)
    adapters = read_adapters(options.adapter, lambda: model_of(base, place))
    adapters.check_base({key: one.shape for key, one in base.tensors.items()}, base.args, place)
    lora = lora_config(adapters.settings)
    manifest = Manifest(
        0,
        states={"train_state": {"iteration": 0}, "base": {"path": os.path.abspath(options.base)}},
        vocab_size=base.vocab_size,
        args={**base.args, "lora_config": lora.to_dict()},
    )
    with new_folder(options.save_dir) as folder:
        entries = {key: _entry(key, values) for key, values in adapters.tensors.items()}
        manifest.files[_FILE] = write_shard(os.path.join(folder, _FILE), list(entries.values()))
        for key, entry in entries.items():
            part = whole_slice(ParameterSharding.replicated(entry.shape))
            manifest.tensors[key] = StoredTensor(entry.shape, "float32", None, [entry.piece(part, _FILE)])
        durable.write_file(os.path.join(folder, MANIFEST_FILE), manifest.to_bytes())
    settings = ", ".join(f"{name}: {value}" for name, value in adapters.settings.items())
    return [
        f"wrote {len(adapters.cells)} adapters of {options.adapter} as a checkpoint: {options.save_dir}",
        f"to train on: lora_config: {{use_lora: True, lora_load: {options.save_dir}, {settings}}}",
    ]


def _entry(key, values):
    return Entry(key, "float32", values.shape, values.nbytes, values.reshape(-1).view("u1"))


_COMMANDS = {"inspect": _inspect, "merge": _merge, "unmerge": _unmerge, "export": _export, "import": _import}


if __name__ == "__main__":
    sys.exit(main())
