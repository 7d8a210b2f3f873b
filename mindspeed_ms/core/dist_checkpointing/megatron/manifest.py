"""Manifest of a checkpoint that Megatron wrote, pointing at the bytes of its files: no tensor is read or copied.

`CheckpointReader`, the load in any layout and the checkpoint tool work on it as on our own. Our rows of qkv and [gate; up] are
Megatron's, so that every tensor keeps its bits; padded rows of the vocabulary keep their number.
"""

import os
from dataclasses import dataclass, field

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, Manifest, StoredPiece, StoredTensor
from mindspeed_ms.core.dist_checkpointing.megatron import files, kept, names, optimizer, torch_dist, torch_dist_buffers
from mindspeed_ms.core.dist_checkpointing.megatron.arguments import (
    complete_arguments,
    configuration_of,
    plain_arguments,
    refused_arguments,
    true_vocabulary,
)
from mindspeed_ms.core.dist_checkpointing.megatron.ranks import file_places, parameters_of
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorReference
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.sharding import FlatSlice
from mindspeed_ms.layout.stages import split_layers

_OLDEST_VERSION = 2.0
_UNTIED = "untie_embeddings_and_output_weights"


@dataclass
class MegatronManifest(Manifest):
    """Manifest made from a folder that Megatron wrote.

    Attributes:
        arguments (dict): Megatron's `args`, plain values.
        configuration (AllConfig): model and layout from the arguments.
        style (str): names in the files, see `names.STYLES`.
        not_resumable (str): why a training cannot go on from it; "" if it can.
        refused (list[str]): flags in `args` of features that do not exist here.
        has_only_weights (bool): a folder `release`, which a training starts from at its beginning.
    """

    arguments: dict = field(default_factory=dict)
    configuration: object = None
    style: str = names.CORE
    not_resumable: str = ""
    refused: list = field(default_factory=list)
    has_only_weights: bool = False
    has_keys_in_files = False

    def add(self, key, parameter_slice, dtype, grouping, file, reference):
        """Add a stored part of the tensor `key`; a part that is there already becomes a replica to compare.

        Args:
            parameter_slice (FlatSlice): which elements.
            dtype (str): of the tensor.
            grouping (Optional[str]): of its rows.
            file (str): in the checkpoint's folder.
            reference ((int, int)): bytes of the file.

        Raises:
            CheckpointError: another dtype or shape than other ranks' parts.
        """
        shape = parameter_slice.global_shape
        stored = self.tensors.setdefault(key, StoredTensor(shape, dtype, grouping))
        if (stored.dtype, stored.shape) != (dtype, shape):
            other = stored.pieces[0].file
            raise CheckpointError(
                f"{file}: {key} is {dtype} {list(shape)}, but {stored.dtype} {list(stored.shape)} in {other}."
            )
        piece = StoredPiece(parameter_slice, file, *reference, "", "")
        same = next((one for one in stored.pieces if one.slice == parameter_slice), None)
        if same is None:
            stored.pieces.append(piece)
        elif (same.file, same.start) != (file, piece.start):
            self.replicas.append((key, same, piece))


def read_megatron_manifest(folder, iteration=None):
    """Read the MegatronManifest of a folder.

    Args:
        folder (str): of one checkpoint (`iter_0000010`, `release`), or one with `latest_checkpointed_iteration.txt`.
        iteration (Optional[int]): which, of a folder with several.

    Raises:
        CheckpointError: no checkpoint of Megatron, a file that is missing, cut off or refused, tensors that do not fit the
            arguments, or that are missing or left over; names file and tensor.
    """
    folder = files.checkpoint_of(os.fspath(folder), iteration)
    if files.is_torch_dist_folder(folder):
        return _read_torch_dist(folder)
    ranks = files.read_rank_files(folder)
    _check_versions(folder, ranks)
    chunks = [_chunks_of(folder, rank) for rank in ranks]
    style, experts = _style_of(chunks)
    arguments = plain_arguments(ranks[0].tree.get("args"))
    sizes = files.parallel_sizes(arguments, [rank.folder for rank in ranks])
    counts = _layer_counts(folder, ranks, chunks, arguments, sizes)
    real = sum(map(sum, counts))
    shapes = {name: one.shape for rank_chunks in chunks for chunk in rank_chunks for name, (one, _) in chunk.items()}
    given = arguments if _UNTIED in arguments else {**arguments, _UNTIED: _is_untied(chunks)}
    complete = complete_arguments(given, shapes, sizes, real)
    config = configuration_of(complete, counts, sizes, experts == names.GROUPED, os.path.join(folder, ranks[0].name))
    manifest = _new_manifest(folder, ranks[0].tree, arguments, config, style)
    model = describe_model(config)
    found = optimizer.FoundStates()
    try:
        places = file_places(model)
        for rank, rank_chunks in zip(ranks, chunks):
            at = places[rank.tensor, rank.pipeline, rank.expert]
            parameters = _in_file_order(rank_chunks, parameters_of(model, at, style))
            references = _add_weights(manifest, folder, rank, rank_chunks, parameters)
            manifest.files[rank.name] = os.path.getsize(os.path.join(folder, rank.name))
            optimizer.add_states(manifest, folder, rank, parameters, references, found)
    except LayoutError as error:
        raise CheckpointError(f"{folder}: its args describe an impossible layout: {error}") from error
    optimizer.finish(manifest, folder, found)
    manifest.foreign = {"megatron": kept.keep(ranks[0].tree, found, style, experts)}
    return manifest


def _read_torch_dist(folder):
    common, content = torch_dist.read_files(folder)
    arguments = plain_arguments(common.get("args"))
    shapes, layers = torch_dist.shapes_of(content)
    sizes = {**files.parallel_sizes(arguments, ["mp_rank_00"]), "tp": 1}
    complete = complete_arguments(arguments, shapes, sizes, layers)
    sizes = files.parallel_sizes(arguments, ["mp_rank_00"])
    counts = _counts_of_arguments(complete)
    config = configuration_of(complete, counts, sizes, False, os.path.join(folder, files.COMMON_FILE))
    style = names.TRANSFORMER_ENGINE if arguments.get("transformer_impl") == names.TRANSFORMER_ENGINE else names.CORE
    manifest = _new_manifest(folder, common, arguments, config, style)
    found = optimizer.FoundStates()
    try:
        found.problem = torch_dist.problem_of_experts(content, arguments)
        unknown = torch_dist.add_tensors(manifest, folder, content, describe_model(config), not found.problem)
        if not found.problem and torch_dist_buffers.has_buffers(content):
            torch_dist_buffers.add_buffers(manifest, folder, content, describe_model(config), style, found)
    except LayoutError as error:
        raise CheckpointError(f"{folder}: its args describe an impossible layout: {error}") from error
    manifest.files[files.COMMON_FILE] = os.path.getsize(os.path.join(folder, files.COMMON_FILE))
    torch_dist.note_optimizer(manifest, folder, common, unknown, found)
    optimizer.finish(manifest, folder, found)
    manifest.foreign = {"megatron": kept.keep(common, found, style, _form_of_arguments(arguments))}
    return manifest


def _form_of_arguments(arguments):
    """Form of the experts that a `torch_dist` folder was saved from; its tensors have the same names and shapes in all."""
    if not arguments.get("moe_grouped_gemm"):
        return names.SEQUENTIAL
    has_engine = arguments.get("transformer_impl") == names.TRANSFORMER_ENGINE
    return names.ENGINE_GROUPED if has_engine and not arguments.get("moe_use_legacy_grouped_gemm") else names.GROUPED


def _counts_of_arguments(arguments):
    """Layers of each stage and chunk by the arguments; one stage where they do not say it."""
    layers, stages = arguments["num_layers"], arguments.get("pipeline_model_parallel_size") or 1
    ends = {
        "first_stage": arguments.get("decoder_first_pipeline_num_layers"),
        "last_stage": arguments.get("decoder_last_pipeline_num_layers"),
    }
    chunks = arguments.get("virtual_pipeline_model_parallel_size")
    # the embedding and the loss may count as a layer
    first, last = (bool(arguments.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    try:
        counts = [list(row) for row in split_layers(layers + first + last, stages, chunks, **ends).counts]
    except LayoutError:
        return [[layers]]
    counts[0][0] -= first
    counts[-1][-1] -= last
    return counts


def _check_versions(folder, ranks):
    first = ranks[0].tree
    for rank in ranks:
        path, version = os.path.join(folder, rank.name), rank.tree.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < _OLDEST_VERSION:
            raise CheckpointError(
                f"{path} has checkpoint_version {version}, whose rows of query, key and value are in another order: expected "
                f"{_OLDEST_VERSION} or newer. Load and save it with a newer Megatron first."
            )
        if rank.tree.get("iteration") != first.get("iteration"):
            raise CheckpointError(
                f"{path} is of iteration {rank.tree.get('iteration')}, but {ranks[0].name} of {first.get('iteration')}: ranks "
                "of two saves."
            )


def _chunks_of(folder, rank):
    """Models of a file by chunk: list of {core name: (TensorReference, name in the file)}."""
    tree, path = rank.tree, os.path.join(folder, rank.name)
    keys = ["model"] if "model" in tree else []
    while f"model{len(keys)}" in tree and keys != ["model"]:
        keys.append(f"model{len(keys)}")
    if not keys:
        raise CheckpointError(f"{path} holds no weights: expected model, or model0, model1, ...")
    result = []
    for key in keys:
        chunk = {}
        for name, value in _flat(tree[key]):
            if name.rpartition(".")[2] == names.EXTRA_STATE or value is None:
                continue
            if not isinstance(value, TensorReference):
                raise CheckpointError(f"{path}: {key}/{name} is a {type(value).__name__}: expected a tensor.")
            core, _ = names.core_name(name)
            if core in chunk:
                raise CheckpointError(f"{path}: {key} holds {core} twice, as {chunk[core][1]} and as {name}.")
            chunk[core] = value, name
        result.append(chunk)
    return result


def _flat(tree, prefix=""):
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))


def _style_of(chunks):
    """(style of the names, form of the experts)."""
    all_names = [name for rank in chunks for chunk in rank for _, name in chunk.values()]
    found = {names.core_name(name)[1] for name in all_names}
    style = next((style for style in reversed(names.STYLES) if style in found), names.CORE)
    if any(name.endswith(".experts.weight1") for name in all_names):
        return style, names.GROUPED
    return style, names.ENGINE_GROUPED if any(map(names.is_engine_expert, all_names)) else names.SEQUENTIAL


def _is_untied(chunks):
    """Whether the head has a weight of its own, as the files show it: another name, or values, than a tied one's copy."""
    entries = [chunk[names.OUTPUT_LAYER] for rank in chunks for chunk in rank if names.OUTPUT_LAYER in chunk]
    words = [chunk[names.WORDS][0] for rank in chunks for chunk in rank if names.WORDS in chunk]
    if not entries or not words or entries[0][1].startswith("word_embeddings_for_head"):
        return False
    head = entries[0][0]
    return head.shape != words[0].shape or head.path == words[0].path or not np.array_equal(head.read(), words[0].read())


def _layer_counts(folder, ranks, chunks, arguments, sizes):
    """Layers of each stage and chunk, as the files hold them."""
    counts = [None] * sizes["pp"]
    for rank, rank_chunks in zip(ranks, chunks):
        found = [len({_layer(name) for name in chunk} - {None}) for chunk in rank_chunks]
        if counts[rank.pipeline] not in (None, found):
            raise CheckpointError(
                f"{os.path.join(folder, rank.name)} holds {found} layers in its chunks, other ranks of the stage "
                f"{counts[rank.pipeline]}."
            )
        counts[rank.pipeline] = found
    if len({len(row) for row in counts}) != 1:
        raise CheckpointError(f"{folder}: the stages hold {[len(row) for row in counts]} chunks: expected as many in each.")
    noops, total = arguments.get("noop_layers"), arguments.get("num_layers")
    if noops:
        per_chunk = total // (len(counts) * len(counts[0]))
        counts = [[per_chunk] * len(row) for row in counts]
    elif isinstance(total, int) and total != sum(map(sum, counts)):
        raise CheckpointError(f"{folder} holds {sum(map(sum, counts))} layers, but its args say num_layers {total}.")
    return counts


def _layer(name):
    parts = name.split(".")
    return int(parts[2]) if name.startswith(f"{names.CORE_LAYERS}.") and parts[2].isdigit() else None


def _new_manifest(folder, tree, arguments, config, style):
    iteration = tree.get("iteration") or 0
    consumed = arguments.get("consumed_train_samples") or 0
    parallel = config.parallel_config
    return MegatronManifest(
        iteration,
        states={
            "train_state": {
                "iteration": iteration,
                "consumed_train_samples": consumed,
                "consumed_valid_samples": arguments.get("consumed_valid_samples") or 0,
                "skipped_iterations": 0,
                "epoch": 0,
                "step_in_epoch": iteration,
            },
            "opt_param_scheduler": None,
            "optimizer": None,
        },
        layout={
            "tensor": parallel.tensor_model_parallel_size,
            "pipeline": parallel.pipeline_model_parallel_size,
            "virtual_pipeline": parallel.virtual_pipeline_model_parallel_size or 1,
            "context": arguments.get("context_parallel_size") or 1,
            "expert": parallel.expert_model_parallel_size,
            "data": arguments.get("data_parallel_size") or 1,
            "world": arguments.get("world_size") or 1,
        },
        vocab_size=true_vocabulary(arguments),
        args={name: section for name, section in config.to_dict().items() if name in _SECTIONS},
        saved_at=os.path.getmtime(folder),
        arguments=arguments,
        configuration=config,
        style=style,
        refused=refused_arguments(arguments),
        has_only_weights=os.path.basename(os.path.normpath(folder)) == files.RELEASE,
    )


_SECTIONS = ("model_config", "moe_config", "parallel_config")


def _in_file_order(chunks, parameters):
    """Parameters in the order of the file, which is that of Megatron's modules."""
    places = {}
    for number, chunk in enumerate(chunks):
        for core in chunk:
            places[number, core] = len(places)
    return sorted(parameters, key=lambda one: places.get((one.chunk, one.core), len(places)))


def _add_weights(manifest, folder, rank, chunks, parameters):
    """Add the weights of a file; returns {(chunk, core name): TensorReference}."""
    path = os.path.join(folder, rank.name)
    references, left = {}, {(number, name): entry for number, chunk in enumerate(chunks) for name, entry in chunk.items()}
    missing = []
    for parameter in parameters:
        entry = left.pop((parameter.chunk, parameter.core), None)
        if entry is None:
            missing.append(parameter.core)
            continue
        reference, name = entry
        check_reference(path, name, reference, parameter.file_shape)
        references[parameter.chunk, parameter.core] = reference
        part = FlatSlice(parameter.sharding, 0, parameter.sharding.numel)
        span = reference.start, reference.stop
        manifest.add(parameter.key, part, reference.dtype, parameter.description.grouping, rank.name, span)
    if missing or left:
        raise CheckpointError(
            f"{path} does not hold the model of its args: "
            + "; ".join(
                f"{title}: {', '.join(sorted(found)[:6])}{' ...' if len(found) > 6 else ''}"
                for title, found in (
                    ("missing", missing),
                    ("left over", [name if len(chunks) == 1 else f"model{number}/{name}" for number, name in left]),
                )
                if found
            )
            + "."
        )
    return references


def check_reference(path, name, reference, shape):
    """Check shape, dtype and order of a tensor in a file.

    Raises:
        CheckpointError: naming file and tensor.
    """
    if tuple(reference.shape) != tuple(shape):
        raise CheckpointError(f"{path}: {name} has shape {list(reference.shape)}, expected {list(shape)} by its args.")
    if reference.dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: {name} is {reference.dtype}: expected one of {', '.join(DTYPE_BYTES)}.")
    if not reference.is_contiguous:
        raise CheckpointError(f"{path}: {name} is not stored row by row (strides {list(reference.stride)}).")
