"""Loading of a checkpoint into a model and its optimizer, in any layout of either.

All ranks call everything together; each reads only the bytes of its own slices (and, with crc_check, its share of a check
of all files).
"""

import math

import numpy as np

from mindspeed_ms.core import comm, storage
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.agreement import on_all_ranks, on_rank_zero
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import read_manifest
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, optimizer_key
from mindspeed_ms.core.dist_checkpointing.partial_reads import PartialReads
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.core.dist_checkpointing.regrouped_reader import in_form_of
from mindspeed_ms.core.logging import logger

_DOING = "the checkpoint was not loaded"


def find_checkpoint(folder, iteration=None, crc_check=False, config=None):
    """Find the checkpoint to load: `folder` itself, an iteration in it, or the newest complete one of a run.

    Args:
        folder (str): of one checkpoint, or of a run.
        iteration (Optional[int]): which; None: the newest; damaged ones are named in a warning and skipped.
        crc_check (bool): read everything and compare the check sums.
        config (Optional[AllConfig]): the model, see `foreign.read_manifest`.

    Returns:
        str: its folder.

    Raises:
        CheckpointError: on all ranks: none there, or the named one is damaged.
    """
    on_rank_zero(_DOING, folders.restore_replaced, folder)
    named = on_rank_zero(_DOING, folders.named_checkpoint, folder, iteration)
    if named is not None:
        problem = _problem(named, iteration, crc_check, config)
        if problem:
            raise CheckpointError(problem)
        return named
    problems = []
    for path in on_rank_zero(_DOING, folders.candidates, folder):
        problem = _problem(path, iteration, crc_check, config)
        if problem is None:
            if comm.get_rank() == 0 and not problems:
                _tell_left_aside(folder, path)
            return path
        problems.append(problem)
        if comm.get_rank() == 0:
            logger.warning("passed over a checkpoint: %s", problem)
    raise folders.none_left(folder, problems)


def _tell_left_aside(folder, path):
    """Warn if the folder has newer iterations than the one the tracker names."""
    numbers = sorted(folders.iterations_in(folder))
    own = [number for number in numbers if folders.checkpoint_folder(folder, number) == path]
    if own and numbers[-1] > own[0]:
        logger.warning(
            "%s names iteration %d: the checkpoints of iterations %s in %s are left aside (ckpt_step, --ckpt-step, "
            "takes one of them)",
            folders.TRACKER_FILE,
            own[0],
            numbers[numbers.index(own[0]) + 1 :],
            folder,
        )


def _problem(path, iteration, crc_check, config):
    problem = on_rank_zero(_DOING, folders.problem_of, path, iteration, config)
    if problem is None and crc_check:
        reader = CheckpointReader(path, read_manifest(path, iteration, config))
        parts = on_all_ranks(_DOING, reader.verify, comm.get_rank(), comm.get_world_size())
        damaged = [text for part in parts for text in part]
        if damaged:
            problem = f"{path} is damaged: {'; '.join(damaged[:5])}{' ...' if len(damaged) > 5 else ''}."
    return problem


def open_checkpoint(path, all_config=None, step=None):
    """Open a checkpoint on every rank: CheckpointReader, of experts in the model's form (`moe_grouped_gemm`).

    Args:
        path (str): its folder.
        all_config (Optional[AllConfig]): the model; needed for formats whose files do not say it (`foreign`).
        step (Optional[int]): which one of a folder of several; None: the newest.

    Raises:
        CheckpointError: on all ranks, if one of them cannot read it (the folder must be on a disk that all share).
    """
    readers = []

    def read():
        readers.append(in_form_of(CheckpointReader(path, read_manifest(path, step, all_config)), all_config))

    on_all_ranks(_DOING, read)
    return readers[0]


def load_tensors(reader, tensors, strict=True, vocab_size=None):
    """Fill this rank's tensors from a checkpoint.

    Weights in another dtype are cast: float32 weights come from the float32 masters of a half-precision checkpoint, and
    masters from its weights if it has none. Rows of a vocabulary beyond `vocab_size` are padding: they may be missing or
    be left out.

    Args:
        reader (CheckpointReader): what `open_checkpoint` gives.
        tensors (list[ShardedTensor]): what to fill; optimizer states only if the checkpoint's are to be used too.
        strict (bool): every tensor must be stored, every stored one used by some rank; else differences are logged.
        vocab_size (Optional[int]): of this run; the checkpoint's own counts too, no row of either is lost.

    Raises:
        CheckpointError: on all ranks: names that are missing or not used, other shapes, damaged files.
    """
    vocab_size = max(vocab_size or 0, reader.manifest.vocab_size or 0) or None
    _check_names(reader.manifest, tensors, strict, vocab_size)
    _check_replicas(reader)
    partial_reads = PartialReads(tensors)
    on_all_ranks(_DOING, _fill_all, reader, tensors, vocab_size, partial_reads)
    partial_reads.check(_DOING, reader)
    _log_casts(reader.manifest, tensors)


def _check_replicas(reader):
    """Compare what another program's ranks hold in several copies; each rank reads a share."""
    if not reader.manifest.replicas:
        return
    parts = on_all_ranks(_DOING, reader.check_replicas, comm.get_rank(), comm.get_world_size())
    problems = [text for part in parts for text in part]
    if problems:
        raise CheckpointError(
            f"{reader.folder} is damaged, or of ranks of several saves: {'; '.join(problems[:5])}"
            f"{' ...' if len(problems) > 5 else ''}."
        )


def _check_names(manifest, tensors, strict, vocab_size):
    with_optimizer = any(tensor.key.startswith(OPTIMIZER_PREFIX) for tensor in tensors)
    wanted, missing, wrong = {}, set(), set()
    for tensor in tensors:
        source = _source(manifest, tensor)
        wanted[tensor.key] = source
        if source is None:
            missing.add(tensor.key)
        elif not _fits(manifest.tensors[source], tensor, vocab_size):
            stored = manifest.tensors[source].shape
            wrong.add(f"{source} {tuple(stored)} instead of {tensor.slice.global_shape}")
    reports = comm.world_group().all_gather_object((with_optimizer, wanted, missing, wrong))
    used = {name for _, names, _, _ in reports for pair in names.items() for name in pair}
    counted = any(report[0] for report in reports)
    unused = {key for key in manifest.tensors if key not in used and (counted or not key.startswith(OPTIMIZER_PREFIX))}
    missing = set().union(*(report[2] for report in reports))
    wrong = set().union(*(report[3] for report in reports))
    problems = [
        f"{title}: {_names(names)}"
        for title, names in (("missing in the checkpoint", missing), ("not in the model", unused), ("of another shape", wrong))
        if names
    ]
    if problems and (strict or wrong):
        raise CheckpointError(
            f"the checkpoint does not fit the model ({'; '.join(problems)})."
            + ("" if wrong else " load_strict: False (--load-strict false) loads what fits.")
        )
    if problems and comm.get_rank() == 0:
        logger.warning("loaded in part (load_strict is off): %s", "; ".join(problems))


def _names(names):
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _source(manifest, tensor):
    """Key of the stored tensor to load: the tensor's own, or for another precision that of the master or the weight."""
    key = tensor.key
    prefix = optimizer_key("fp32_param", "")
    if key.startswith(prefix) and key not in manifest.tensors:
        key = key.removeprefix(prefix)
    elif not key.startswith(OPTIMIZER_PREFIX) and key in manifest.tensors and tensor.dtype == "float32":
        master = optimizer_key("fp32_param", key)
        if manifest.tensors[key].dtype != "float32" and master in manifest.tensors:
            return master
    return key if key in manifest.tensors else None


def _fits(stored, tensor, vocab_size):
    shape = tensor.slice.global_shape
    if stored.shape == shape:
        return True
    if "vocab" not in (tensor.grouping, stored.grouping) or stored.shape[1:] != shape[1:]:
        return False
    return vocab_size is not None and vocab_size <= min(stored.shape[0], shape[0])


def _fill_all(reader, tensors, vocab_size, partial_reads):
    for place, tensor in enumerate(tensors):
        source = _source(reader.manifest, tensor)
        if source is not None:
            _fill(reader, source, tensor, vocab_size, partial_reads.recorder(tensor, place, source))


def _fill(reader, source, tensor, vocab_size, on_part):
    stored = reader.manifest.tensors[source]
    if stored.dtype == tensor.dtype:
        with storage.filling(tensor.tensor) as array:
            missing = reader.read(source, tensor.slice, array, on_part)
    else:
        array = np.empty(tensor.slice.local_shape, numpy_dtype(stored.dtype))
        values = storage.from_array(array, stored.dtype)
        if stored.shape != tensor.slice.global_shape:
            storage.write(values, tensor.tensor)  # padding that is not stored stays
        missing = reader.read(source, tensor.slice, array, on_part)
        storage.write(tensor.tensor, values)
    padding = math.inf if stored.shape == tensor.slice.global_shape else vocab_size * math.prod(stored.shape[1:])
    lost = [part for part in missing if part[0] < padding]
    if lost:
        raise CheckpointError(f"{reader.folder} stores no elements {lost[0][0]} to {lost[0][1]} of {source}.")


def _log_casts(manifest, tensors):
    counts, padded = {}, None
    for tensor in tensors:
        source = _source(manifest, tensor)
        if source is not None and manifest.tensors[source].shape != tensor.slice.global_shape:
            padded = manifest.tensors[source].shape[0], tensor.slice.global_shape[0]
        if source is not None and (manifest.tensors[source].dtype != tensor.dtype or source != tensor.key):
            kind = "masters" if tensor.key.startswith(OPTIMIZER_PREFIX) else "weights"
            origin = "masters" if source.startswith(OPTIMIZER_PREFIX) else "weights"
            change = f"{tensor.dtype} {kind} from the checkpoint's {manifest.tensors[source].dtype} {origin}"
            counts[change] = counts.get(change, 0) + 1
    for change, count in counts.items():
        logger.info("loaded %d tensors in another precision: %s", count, change)
    if padded is not None and comm.get_rank() == 0:
        logger.warning(
            "the vocabulary is padded to %d rows, in the checkpoint to %d: padded rows take part in the softmax, so "
            "that losses differ a little (--padded-vocab-size %d keeps them)",
            padded[1],
            padded[0],
            padded[0],
        )
