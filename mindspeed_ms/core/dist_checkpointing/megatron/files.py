"""Folders and files of a Megatron checkpoint (formats `torch` and `torch_dist`): which ranks are there.

iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    tensor, pipeline and expert rank; PPP only with a pipeline,
iter_0000010/mp_rank_TT[_PPP][_EEE]/distrib_optim.pt      EEE only with expert parallelism
iter_0000010/.metadata, common.pt, *.distcp               torch_dist
"""

import filecmp
import os
import re
from dataclasses import dataclass

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file import read_torch_file
from mindspeed_ms.layout.ranks import WorldLayout, world_unit

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
METADATA_FILE, COMMON_FILE = ".metadata", "common.pt"
TRACKER_FILE, RELEASE = "latest_checkpointed_iteration.txt", "release"
_FIRST_BYTES = 4096  # of a file: what most others differ in
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")


def is_megatron_folder(path):
    """Whether a folder is one checkpoint that Megatron wrote (complete or not)."""
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, "manifest.json")):
        return False
    return is_torch_dist_folder(path) or bool(_rank_folders(path))


def checkpoint_of(folder, iteration=None):
    """Folder of one checkpoint: `folder` itself, or the one in it that `iteration` or the tracker names.

    Raises:
        CheckpointError: there is none.
    """
    if is_megatron_folder(folder):
        return folder
    tracker = os.path.join(folder, TRACKER_FILE)
    if iteration is None and os.path.isfile(tracker):
        with open(tracker, encoding="utf-8", errors="replace") as file:
            text = file.read().strip()
        iteration = RELEASE if text == RELEASE else int(text) if text.isdigit() else None
    if iteration is None:
        raise CheckpointError(f"{folder} holds no checkpoint of Megatron: no mp_rank_* folder and no {TRACKER_FILE}.")
    path = os.path.join(folder, folder_name(iteration))
    if not is_megatron_folder(path):
        raise CheckpointError(f"{path} is no checkpoint of Megatron.")
    return path


def folder_name(iteration):
    """Name of the folder of an iteration, or of `RELEASE`."""
    return iteration if iteration == RELEASE else f"iter_{iteration:07d}"


def is_torch_dist_folder(path):
    """Whether a folder is a checkpoint of the format `torch_dist`, complete or not."""
    return any(name in (METADATA_FILE, COMMON_FILE) or name.endswith(".distcp") for name in os.listdir(path))


def _rank_folders(path):
    return sorted(name for name in os.listdir(path) if _FOLDER.match(name) and os.path.isdir(os.path.join(path, name)))


@dataclass(frozen=True)
class RankFile:
    """File of one model-parallel rank.

    Attributes:
        name (str): path of `model_optim_rng.pt` in the checkpoint's folder.
        tensor, pipeline, expert (int): the rank's coordinates.
        tree (dict): content; tensors are `TensorReference`s.
    """

    name: str
    tensor: int
    pipeline: int
    expert: int
    tree: dict

    @property
    def folder(self):
        """Its folder in the checkpoint's."""
        return os.path.dirname(self.name)


def rank_folder(tensor, pipeline, expert, has_pipeline, has_experts):
    """Name of a rank's folder."""
    name = f"mp_rank_{tensor:02d}"
    return name + (f"_{pipeline:03d}" if has_pipeline else "") + (f"_{expert:03d}" if has_experts else "")


def read_tree(path):
    """Content of a `.pt` file, checked to be a dict.

    Raises:
        DamagedCheckpointError: missing or cut off.
        CheckpointError: it holds something else.
    """
    if not os.path.isfile(path):
        raise DamagedCheckpointError(f"{path} is missing.")
    tree = read_torch_file(path)
    if not isinstance(tree, (dict, list)):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}: expected a dict that Megatron saved.")
    return tree


def read_rank_files(folder):
    """All ranks' files of a checkpoint: list[RankFile], stage by stage.

    Raises:
        CheckpointError: none there, a rank's file is missing, or the names are those of another layout than the arguments'.
    """
    names = _rank_folders(folder)
    if not names:
        raise CheckpointError(f"{folder} holds no checkpoint of Megatron: no mp_rank_* folder and no {METADATA_FILE}.")
    first = read_tree(os.path.join(folder, names[0], MODEL_FILE))
    sizes = parallel_sizes(_namespace(folder, names[0], first), names)
    needed, possible = (
        {rank_folder(*place, sizes["pp"] > 1, sizes["ep"] > 1): place for place in places} for places in _places(sizes)
    )
    missing = [name for name in needed if not os.path.isfile(os.path.join(folder, name, MODEL_FILE))]
    layout = f"tensor {sizes['tp']}, pipeline {sizes['pp']}, expert {sizes['ep']} parallel by its args"
    if missing:
        raise DamagedCheckpointError(
            f"{folder} is incomplete: {', '.join(f'{name}/{MODEL_FILE}' for name in missing[:4])}"
            f"{' ...' if len(missing) > 4 else ''} is missing ({layout})."
        )
    others = [name for name in names if name not in possible]
    if others:
        raise CheckpointError(
            f"{folder} holds {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}, which no rank of the layout saves "
            f"({layout}): remove what another save left there."
        )
    trees = {names[0]: first}
    result = []
    wanted = {name: place for name, place in possible.items() if name in needed or name in names}
    for name, (tensor, pipeline, expert) in wanted.items():
        tree = trees.get(name) or read_tree(os.path.join(folder, name, MODEL_FILE))
        if not isinstance(tree, dict):
            raise CheckpointError(
                f"{os.path.join(folder, name, MODEL_FILE)} holds a list: expected a dict that Megatron saved."
            )
        result.append(RankFile(f"{name}/{MODEL_FILE}", tensor, pipeline, expert, tree))
    _check_no_copies(folder, result)
    return result


def _check_no_copies(folder, ranks):
    """CheckpointError if two ranks have the same file, byte by byte: one was copied in place of another. On a stage without
    experts, expert-parallel ranks do have the same."""
    for file in (MODEL_FILE, OPTIMIZER_FILE):
        seen = {}
        for rank in ranks:
            path = os.path.join(folder, rank.folder, file)
            if not os.path.isfile(path):
                continue
            with open(path, "rb") as opened:
                start = opened.read(_FIRST_BYTES)
            place = (rank.tensor, rank.pipeline) if not _has_experts(rank.tree) else rank.folder
            other, where = seen.setdefault((os.path.getsize(path), start), (path, place))
            if other != path and where != place and filecmp.cmp(other, path, shallow=False):
                raise CheckpointError(f"{path} is a copy of {other}: each rank has values of its own, copy its own file there.")


def _has_experts(tree):
    """Whether a tree, or any of the names in it, is that of an expert."""
    if not isinstance(tree, dict):
        return False
    return any((isinstance(name, str) and ".experts." in name) or _has_experts(value) for name, value in tree.items())


def _namespace(folder, name, tree):
    arguments = tree.get("args") if isinstance(tree, dict) else None
    return dict(vars(arguments)) if hasattr(arguments, "__dict__") else {}


def parallel_sizes(arguments, names):
    """Sizes {tp, pp, cp, ep, expert_tp, world} from the arguments; those that they lack from the folders' names."""
    parts = [_FOLDER.match(name).groups() for name in names]
    found = [max(int(part[place] or 0) for part in parts) + 1 for place in range(3)]
    tensor = arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size") or found[0]
    expert = arguments.get("expert_model_parallel_size")
    if expert is None:
        expert = found[2]
    pipeline = arguments.get("pipeline_model_parallel_size") or (found[1] if expert == 1 or found[2] > 1 else 1)
    return {
        "tp": tensor,
        "pp": pipeline,
        "cp": arguments.get("context_parallel_size") or 1,
        "ep": expert,
        "expert_tp": (arguments.get("expert_tensor_parallel_size") if arguments.get("num_experts") else None) or tensor,
    }


def _places(sizes):
    """(tensor, pipeline, expert) of the files that Megatron saves, and of those that its ranks load.

    It saves those of the first ranks of the expert-data-parallel groups, which leaves tensor ranks out where there are more of
    them than expert ranks; our writer leaves none out.
    """
    if sizes["ep"] == 1:
        saved = [(tensor, stage, 0) for stage in range(sizes["pp"]) for tensor in range(sizes["tp"])]
        return saved, saved
    world = WorldLayout(world_unit(**sizes), **sizes)
    places = [world.coordinates(rank) for rank in range(world.world_size)]
    return tuple(
        list(dict.fromkeys((at.tp, at.pp, at.ep) for at in some))
        for some in ([at for at in places if at.expert_dp == 0], places)
    )
