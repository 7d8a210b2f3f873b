"""Manifest of a Hugging Face folder: our tensors as pieces that point into its files."""

import os
from dataclasses import dataclass, field

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, StoredPiece, StoredTensor, whole_slice
from mindspeed_ms.core.logging import logger
from mindspeed_ms.models.families import quantization
from mindspeed_ms.models.families.configuration import model_sections, read_configuration
from mindspeed_ms.models.families.family import family_of
from mindspeed_ms.models.families.tensors import tensor_parts
from mindspeed_ms.models.hugging_face import folder
from mindspeed_ms.models.hugging_face.stored_form import form_of

_BLOCK_BYTES = 16 << 20
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass
class HuggingFaceManifest(Manifest):
    """Manifest made from a Hugging Face folder. `args` is the configuration of its model.

    Attributes:
        family (Family): of the model.
        config (dict): content of config.json.
        sources (dict[str, tuple[TensorPart, FolderTensor]]): by their names.
        left_out (dict[str, str]): stored tensors that are not read, with the reason.
    """

    family: object = None
    config: dict = field(default_factory=dict)
    sources: dict = field(default_factory=dict)
    left_out: dict = field(default_factory=dict)
    has_only_weights = True
    has_keys_in_files = False


def read_manifest(path):
    """Read the HuggingFaceManifest of a folder.

    Args:
        path (str): the folder.

    Raises:
        CheckpointError: unknown family; tensors that are missing, unknown, or of another shape than config.json says;
            files that are missing or damaged. Names file and tensor.
    """
    path = os.fspath(path)
    place = os.path.join(path, folder.CONFIG_FILE)
    if not os.path.isfile(place):
        raise CheckpointError(f"{path} has no {folder.CONFIG_FILE}, which says what model it is: copy that of the model there.")
    config = folder.read_json(place)
    family = family_of(config, place)
    found = folder.read_folder(path)
    dtype = _dtype_of(config, found)
    known = {"params_dtype": dtype} if dtype in _FLOATS else {}
    all_config = read_configuration(family, _stored_layers(family, config, found), place, model_config=known)
    parts = tensor_parts(family, describe_model(all_config))
    manifest = HuggingFaceManifest(
        0,
        states={"train_state": {"iteration": 0}},
        vocab_size=all_config.model_config.vocab_size,
        args=model_sections(all_config.to_dict()),
        saved_at=max(os.path.getmtime(os.path.join(path, one.file)) for one in found.values()) if found else 0.0,
        family=family,
        config=config,
    )
    _join(path, manifest, parts, found)
    return manifest


def _stored_layers(family, config, found):
    """config.json without the layers of multi-token prediction, unless the folder holds tensors of them."""
    layers = config.get("num_hidden_layers")
    if not config.get(family.further_layers) or any(name.startswith(f"model.layers.{layers}.") for name in found):
        return config
    return {name: value for name, value in config.items() if name != family.further_layers}


def _dtype_of(config, found):
    """Dtype of a folder's weights: of its first tensor, and of quantised ones what config.json says, else bfloat16."""
    if config.get(quantization.FIELD) is None:
        words = [stored for name, stored in found.items() if "embed" in name]
        return next(iter(words or found.values())).dtype if found else "float32"
    said = config.get("dtype") or config.get("torch_dtype")
    return said if said in _FLOATS else "bfloat16"


def _join(path, manifest, parts, found):
    """Fill tensors and files of the manifest. Raises CheckpointError: parts and files do not agree."""
    family, used, forms = manifest.family, set(), []
    copies = {part.name: part for part in parts if part.is_copy}
    parts = [part for part in parts if not part.is_copy]
    block = quantization.block_of(manifest.config)
    dtype = manifest.args["model_config"]["params_dtype"]
    for part in parts:
        for name in (part.name, *([part.name.removeprefix(family.prefix)] if family.prefix else [])):
            form = form_of(part, name, found, lambda stored: os.path.join(path, stored.file), dtype, block)
            if form is not None:
                manifest.sources.setdefault(part.name, (part, found[form[1][0]]))
                used.update(form[1])
                forms.append((part, form))
                break
    left = {name: stored for name, stored in found.items() if name not in used}
    missing = list(dict.fromkeys(part.name for part in parts if part.name not in manifest.sources))
    manifest.left_out = {**_copies_left_out(path, manifest, copies, left), **_known_leftovers(path, manifest, left)}
    unknown = [name for name in left if name not in manifest.left_out]
    if missing == [_head_of(family)]:
        raise CheckpointError(
            f"{path} has no tensor {missing[0]}, although {folder.CONFIG_FILE} does not say tie_word_embeddings: set that "
            "to true if the head is the embedding, or add the tensor."
        )
    if missing or unknown:
        raise CheckpointError(
            f"{path} does not hold the model of its {folder.CONFIG_FILE} ({family.name}). "
            + " ".join(
                f"{title}: {names}."
                for title, names in (
                    ("Tensors that are missing", _listed(missing)),
                    ("Tensors that the model does not have", _listed(f"{name} ({left[name].file})" for name in unknown)),
                )
                if names
            )
        )
    for part, (form, names, dtype) in forms:
        _add(path, manifest, part, found[names[0]], form, dtype)
        for name in names:
            manifest.files[found[name].file] = os.path.getsize(os.path.join(path, found[name].file))


def _listed(names):
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _add(path, manifest, part, stored, form, dtype):
    place, name = os.path.join(path, stored.file), part.name
    if form is None and stored.shape != part.shape:
        raise CheckpointError(
            f"{place}: tensor {name} has the shape {list(stored.shape)}, but {folder.CONFIG_FILE} says {list(part.shape)}."
        )
    tensor = manifest.tensors.setdefault(part.key, StoredTensor(part.sharding.global_shape, dtype, part.grouping))
    if tensor.dtype != dtype:
        other = next(one for one, (held, _) in manifest.sources.items() if held.key == part.key)
        raise CheckpointError(
            f"{place}: tensor {name} is {dtype}, but {other} is {tensor.dtype}: they are parts of one tensor "
            "and must have one dtype."
        )
    turned = form is None and part.transposed != stored.transposed
    piece = StoredPiece(whole_slice(part.sharding), stored.file, stored.start, stored.stop, "", "", turned, form)
    tensor.pieces.append(piece)


def _copies_left_out(path, manifest, copies, left):
    """Stored copies of embedding and head in layers of multi-token prediction: {name: reason}. Tells of those that differ."""
    reasons, others = {}, []
    for name, part in copies.items():
        original = next((one for held, one in manifest.sources.values() if held.key == part.key), None)
        if name not in left or original is None:
            continue
        same = (left[name].dtype, left[name].shape) == (original.dtype, original.shape)
        same = same and _same_bytes(path, left[name], original)
        reasons[name] = f"it is a copy of {part.key}" if same else f"layers of multi-token prediction use {part.key} here"
        others += [] if same else [name]
    if others:
        logger.warning(
            "%s: left out %s, with other values than the model's own embedding or head, which layers of multi-token "
            "prediction use here",
            path,
            _listed(others),
        )
    return reasons


def _known_leftovers(path, manifest, left):
    """Stored tensors that say nothing new: {name: reason}."""
    family, reasons = manifest.family, {}
    layers = range(manifest.args["model_config"]["num_layers"])
    computed = {name.format(layer=layer) for name in family.computed for layer in layers}
    computed |= {name.removeprefix(family.prefix) for name in computed}
    for name in left:
        if name in computed:
            reasons[name] = "it follows from the configuration"
    head = _head_of(family)
    if head in left and not manifest.args["model_config"]["untie_embeddings_and_output_weights"]:
        _check_copy(path, manifest, head, left[head])
        reasons[head] = "it is a copy of the embedding (tie_word_embeddings)"
    return reasons


def _head_of(family):
    return next(weight.theirs[0] for weight in family.weights if weight.ours == "language_model.output_layer.weight")


def _check_copy(path, manifest, head, stored):
    """Raise CheckpointError if a tied head holds other values than the embedding."""
    name = next(weight.theirs[0] for weight in manifest.family.weights if "word_embeddings" in weight.ours)
    if name not in manifest.sources:
        return  # reported as missing
    original = manifest.sources[name][1]
    if (stored.dtype, stored.shape) != (original.dtype, original.shape) or not _same_bytes(path, stored, original):
        raise CheckpointError(
            f"{os.path.join(path, stored.file)}: tensor {head} is not {name} of {original.file}, although "
            f"{folder.CONFIG_FILE} says tie_word_embeddings: set that to false, or delete the tensor."
        )


def _same_bytes(path, one, other):
    if (one.file, one.start) == (other.file, other.start):
        return True
    with open(os.path.join(path, one.file), "rb") as first, open(os.path.join(path, other.file), "rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.stop - one.start
        while left:
            count = min(left, _BLOCK_BYTES)
            if not np.array_equal(*(np.frombuffer(file.read(count), np.uint8) for file in (first, second))):
                return False
            left -= count
    return True
