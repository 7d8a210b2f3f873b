"""PEFT folders (adapter_model.safetensors, adapter_config.json) of low-rank adapters: read and write.

Names are those of transformers' modules: of each of our linears a family has one module, or several (query, key and value; gate
and up), whose A is the same and whose B has their rows. Adapters whose A differ are joined: their ranks add up.
"""

import json
import os
import re
from dataclasses import replace

import numpy as np

from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, read_safetensors, write_shard
from mindspeed_ms.layout.describers.lora import is_linear
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.models.adapters import Adapters
from mindspeed_ms.models.families.family import families
from mindspeed_ms.models.families.tensors import tensor_parts

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# settings of PEFT that change what is computed, and the values under which they do not
_NOT_READ = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
}
_NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}


def is_peft(path):
    """Whether a folder is of PEFT."""
    return os.path.isfile(os.path.join(path, CONFIG_FILE))


def read(path, model):
    """`Adapters` of a PEFT folder.

    Args:
        path (str): the folder.
        model (ModelDescription): of the base.

    Raises:
        CheckpointError: files that are missing, another kind of adapter, modules that the base does not have, other sizes.
    """
    config = _read_config(path)
    stored = _read_tensors(os.path.join(path, WEIGHTS_FILE))
    modules = {key.removesuffix(".lora_A.weight") for key in stored if key.endswith(".lora_A.weight")}
    unread = sorted(set(stored) - {f"{module}.lora_{one}.weight" for module in modules for one in "AB"})
    if unread or not modules:
        raise CheckpointError(
            f"{path} holds {unread[0] if unread else 'no adapters of linears'}: expected lora_A and lora_B of linears."
        )
    cells = _cells_of(path, model, modules)
    weights = {one.name: one for one in describe_whole_model(replace(model, adapters=()))}
    alpha, stabilized = config.get("lora_alpha", 8), bool(config.get("use_rslora"))
    rank = config.get("r", 8)
    tensors, special = {}, []
    for cell, parts in cells.items():
        present = [(part, module) for part, module in parts if module in modules]
        if present:
            scales = [_scale(config, module, stored) for _, module in present]
            a, b = _joined(path, weights[f"{cell}.weight"], present, scales, stored)
            tensors[f"{cell}.lora_a"], tensors[f"{cell}.lora_b"] = a, b
            own = scales[0] * (len(a) ** 0.5 if stabilized else len(a))
            if (len(a), own) != (rank, alpha):
                special.append({"cell": cell, "rank": len(a), "alpha": own})
    found = [key.removesuffix(".lora_a") for key in tensors if key.endswith("lora_a")]
    settings = {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": float(config.get("lora_dropout") or 0.0),
        "use_rslora": stabilized,
        "target_cells": [{"target_cells": _patterns(found, cells)}, *special],
    }
    return Adapters(path, settings, tensors, {}, str(config.get("base_model_name_or_path") or ""))


def _read_config(path):
    try:
        with open(os.path.join(path, CONFIG_FILE), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path}/{CONFIG_FILE}: peft_type is {kind!r}: expected 'LORA'.")
    for name, harmless in _NOT_READ.items():
        if config.get(name) not in harmless:
            raise CheckpointError(
                f"{path}/{CONFIG_FILE}: {name} is {config[name]!r}: expected {harmless[0]!r}, others are not read."
            )
    return config


def _read_tensors(path):
    """{name: float32 array} of a safetensors file."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} does not exist: a PEFT folder holds it (older ones adapter_model.bin: save them anew).")
    result = {}
    with open(path, "rb") as file:
        for name, one in read_safetensors(path).items():
            if one.dtype not in _NUMPY:
                raise CheckpointError(f"{path}: {name} is {one.dtype}: expected float32, float16 or bfloat16.")
            start, stop = one.ranges[0] if one.ranges else (0, 0)
            file.seek(start)
            values = np.frombuffer(file.read(stop - start), _NUMPY[one.dtype]).reshape(one.shape)
            wide = (values.astype(np.uint32) << 16).view(np.float32) if one.dtype == "bfloat16" else values
            result[name] = wide.astype(np.float32)
    return result


def _modules(family, model):
    """{our cell: [(TensorPart, PEFT's module)]} of all linears of the layers. CheckpointError: not of this family."""
    weights = [one for one in describe_whole_model(replace(model, adapters=())) if one.name.endswith(".weight")]
    linears, result = {one.name for one in weights if is_linear(one)}, {}
    for part in tensor_parts(family, replace(model, adapters=())):
        if part.key in linears:
            module = _PREFIX + part.name.removesuffix(".weight")
            result.setdefault(part.key.removesuffix(".weight"), []).append((part, module))
    return result


def _cells_of(path, model, modules):
    """`_modules` of the family whose modules the adapters name."""
    left = {}
    for family in families().values():
        try:
            cells = _modules(family, model)
        except CheckpointError:
            continue
        left[family.name] = sorted(modules - {module for parts in cells.values() for _, module in parts})
        if not left[family.name]:
            return cells
    unknown = min(left.values(), key=len, default=["?"])
    raise CheckpointError(f"{path} holds adapters of another base: it has {unknown[0]}, which is no linear of the base.")


def _scale(config, module, stored):
    """Factor of a module's product."""
    rank, alpha = len(stored[f"{module}.lora_A.weight"]), config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?{pattern}", module.removeprefix(_PREFIX)):
            alpha = value
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _joined(path, weight, present, scales, stored):
    """(A, B) of one of our linears: equal A once, others one below the other; the factor is that of the first module."""
    blocks, rows, places = [], 0, []
    for (_, module), scale in zip(present, scales):
        a = stored[f"{module}.lora_A.weight"]
        same = next((place for block, place in blocks if block.shape == a.shape and (block == a).all()), None)
        if same is None:
            same = rows
            blocks.append((a, rows))
            rows += len(a)
        places.append((same, scale))
    b = np.zeros((weight.sharding.global_shape[0], rows), np.float32)
    for (part, module), (first, scale) in zip(present, places):
        own = stored[f"{module}.lora_B.weight"]
        sharding = ParameterSharding(b.shape, 0, part.sharding.ranges or ((0, b.shape[0]),))
        sizes = stored[f"{module}.lora_A.weight"].shape[1], own.shape[0]
        if sizes != (weight.sharding.global_shape[1], sharding.local_shape[0]):
            raise CheckpointError(
                f"{path} holds adapters of another base: {module} is for {sizes[0]} inputs and {sizes[1]} outputs, the base "
                f"has {weight.sharding.global_shape[1]} and {sharding.local_shape[0]}."
            )
        columns = sharding.split(b).copy()
        columns[:, first : first + own.shape[1]] = own * (scale / scales[0])
        sharding.place(b, columns)
    return np.concatenate([block for block, _ in blocks]), b


def _patterns(found, cells):
    """Patterns of target_cells: ends of names where all such cells have adapters, else their whole names."""
    ends = dict.fromkeys(cell.rpartition(".")[2] for cell in found)
    result = []
    for end in ends:
        own = [cell for cell in found if cell.endswith(f".{end}")]
        everywhere = len(own) == sum(cell.endswith(f".{end}") for cell in cells)
        result += [rf".*\.{end}"] if everywhere else [re.escape(cell) for cell in own]
    return result


def write(folder, adapters, family, model, base=""):
    """Write a PEFT folder, which must not exist.

    Args:
        folder (str): where to.
        adapters (Adapters): whose cells have modules in the family.
        family (Family), model (ModelDescription): of the base.
        base (str): name or folder of the base, kept in the configuration.

    Raises:
        CheckpointError: cells without a module.
    """
    modules, entries, ranks, alphas = _modules(family, model), [], {}, {}
    settings = {"lora_rank": 8, "lora_alpha": 32, **adapters.settings}
    stabilized = bool(settings.get("use_rslora"))
    for cell in adapters.cells:
        if cell not in modules:
            raise CheckpointError(f"{family.name} models have no module for {cell}.")
        a, b = adapters.tensors[f"{cell}.lora_a"], adapters.tensors[f"{cell}.lora_b"]
        for part, module in modules[cell]:
            rows = ParameterSharding(b.shape, 0, part.sharding.ranges).split(b) if part.sharding.ranges else b
            entries += [_entry(f"{module}.lora_A.weight", a), _entry(f"{module}.lora_B.weight", rows)]
            name = module.removeprefix(_PREFIX)
            ranks[name] = len(a)
            alphas[name] = adapters.scale(cell) * (len(a) ** 0.5 if stabilized else len(a))
    rank, alpha = settings["lora_rank"], settings["lora_alpha"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": settings.get("lora_dropout", 0.0),
        "use_rslora": stabilized,
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": any(part.transposed for cell in adapters.cells for part, _ in modules[cell]),
        "inference_mode": True,
    }
    layers = {int(found[1]) for name in ranks if (found := re.search(r"\.(\d+)\.", name))}
    if layers != set(range(model.stages.num_layers)):
        config["layers_to_transform"] = sorted(layers)
    with new_folder(folder) as place:
        write_shard(os.path.join(place, WEIGHTS_FILE), entries, made_by="pt")
        durable.write_file(os.path.join(place, CONFIG_FILE), (json.dumps(config, indent=2) + "\n").encode())


def _entry(name, values):
    values = np.ascontiguousarray(values, np.float32)
    return Entry(name, "float32", values.shape, values.nbytes, values.reshape(-1).view(np.uint8))
