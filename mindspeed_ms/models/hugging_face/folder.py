"""Files of a Hugging Face folder: which files hold weights, and the places of all tensors in them. Reads no values."""

import json
import os
import re
from dataclasses import dataclass
from math import prod

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES
from mindspeed_ms.core.dist_checkpointing.shard_file import read_safetensors

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
MODEL_FOLDER = "hugging_face"  # of a converted checkpoint, or of a training that started from a model's folder
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_BIN_FILE, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# in the order in which transformers takes them: a whole file before an index
_INDEXES = ((SINGLE_FILE, False), (INDEX_FILE, True), (_BIN_FILE, False), (_BIN_INDEX, True))
# files beside the weights that go with a model wherever it goes
SIDE_FILES = (
    GENERATION_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_ONE_OF_A_RUN = re.compile(r"iter_\d+|release")
_LONGEST_JSON = 256 << 20


@dataclass(frozen=True)
class FolderTensor:
    """Tensor in a file of the folder.

    Attributes:
        file (str): name in the folder.
        dtype (str): "float32", ...
        shape (tuple[int]): as stored.
        start, stop (int): bytes of the file.
        transposed (bool): the file holds it with its two axes swapped (a view in a .bin file).
    """

    file: str
    dtype: str
    shape: tuple
    start: int
    stop: int
    transposed: bool = False


def has_weights(path):
    """Whether a folder holds files of weights under Hugging Face's names."""
    return any(os.path.isfile(os.path.join(path, name)) for name, _ in _INDEXES)


def read_json(path):
    """Content of a JSON file that holds a mapping.

    Raises:
        CheckpointError: missing, damaged, or something else.
    """
    try:
        if os.path.getsize(path) > _LONGEST_JSON:
            raise ValueError("it is too long")
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("expected a mapping")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    return content


def side_files(path):
    """Names of the tokenizer's and generation's files in a folder: list."""
    return [name for name in SIDE_FILES if os.path.isfile(os.path.join(path, name))]


def model_folder_of(path, needs_config=True):
    """Folder of the model's small files that go with a checkpoint: its own, or one beside it; None: there is none.

    Args:
        path (str): a Hugging Face folder, or a checkpoint, of a run or not.
        needs_config (bool): only one with a config.json; a conversion may have kept a tokenizer alone.
    """
    path = os.path.abspath(path)
    if has_weights(path) and os.path.isfile(os.path.join(path, CONFIG_FILE)):
        return path
    places = (path, os.path.dirname(path)) if _ONE_OF_A_RUN.fullmatch(os.path.basename(path)) else (path,)
    found = [os.path.join(place, MODEL_FOLDER) for place in places]
    is_there = [os.path.isfile(os.path.join(one, CONFIG_FILE)) if needs_config else os.path.isdir(one) for one in found]
    return next((one for one, there in zip(found, is_there) if there), None)


def read_folder(path):
    """Places of all tensors of a folder: {name: FolderTensor}.

    Raises:
        CheckpointError: no weights; a file is missing or damaged; the index names a file outside of the folder, or does
            not agree with the files.
    """
    found = [(name, is_index) for name, is_index in _INDEXES if os.path.isfile(os.path.join(path, name))]
    if not found:
        names = ", ".join(name for name, _ in _INDEXES)
        raise CheckpointError(f"{path} holds no weights: expected one of {names}.")
    name, is_index = found[0]
    if not is_index:
        return _read_file(path, name)
    places = _read_index(os.path.join(path, name))
    missing = sorted({file for file in places.values() if not os.path.isfile(os.path.join(path, file))})
    if missing:
        first = next(tensor for tensor, file in places.items() if file == missing[0])
        raise DamagedCheckpointError(
            f"{os.path.join(path, missing[0])} is missing: {name} says that it holds {first} and "
            f"{sum(file in missing for file in places.values()) - 1} more tensors."
        )
    tensors = {}
    for file in sorted(set(places.values())):
        for tensor, place in _read_file(path, file).items():
            if places.get(tensor) != file:
                where = f"in {places[tensor]}" if tensor in places else "nowhere"
                raise DamagedCheckpointError(f"{os.path.join(path, file)} holds tensor {tensor}, which {name} places {where}.")
            tensors[tensor] = place
    lost = sorted(set(places) - set(tensors))
    if lost:
        raise DamagedCheckpointError(f"{os.path.join(path, places[lost[0]])} does not hold tensor {lost[0]}, as {name} says.")
    return tensors


def _read_index(path):
    """weight_map of an index: {tensor: file name}."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path} has no weight_map: expected the file of each tensor.")
    for tensor, file in places.items():
        is_name = isinstance(file, str) and file and file == os.path.basename(file) and file not in (os.curdir, os.pardir)
        if not is_name or "\0" in file or "\\" in file:
            raise CheckpointError(f"{path} places tensor {tensor} in {file!r}: expected the name of a file in the same folder.")
    return places


def _read_file(path, name):
    place = os.path.join(path, name)
    tensors = _read_bin(place, name) if name.endswith(".bin") else _read_safetensors(place, name)
    for tensor, one in tensors.items():
        itemsize = 1 if one.dtype == "float8_e4m3fn" else DTYPE_BYTES.get(one.dtype)
        if itemsize is None or one.stop - one.start != prod(one.shape) * itemsize:
            raise DamagedCheckpointError(
                f"{place}: tensor {tensor} is {one.dtype} {list(one.shape)} in {one.stop - one.start} bytes."
            )
    return tensors


def _read_safetensors(place, name):
    try:
        found = read_safetensors(place)
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
    return {tensor: FolderTensor(name, one.dtype, one.shape, *one.ranges[0]) for tensor, one in found.items()}


def _read_bin(place, name):
    # only these old files need it
    from mindspeed_ms.core.dist_checkpointing.torch_file import TensorReference, read_torch_file

    content = read_torch_file(place)
    if not isinstance(content, dict):
        raise CheckpointError(f"{place} holds a {type(content).__name__}: expected a dict of tensors.")
    tensors = {}
    for tensor, one in content.items():
        if not isinstance(tensor, str) or not isinstance(one, TensorReference):
            raise CheckpointError(f"{place} holds {tensor!r}, which is no tensor.")
        turned = not one.is_contiguous and len(one.shape) == 2 and tuple(one.stride) == (1, one.shape[0])
        if not one.is_contiguous and not turned:
            raise CheckpointError(f"{place}: tensor {tensor} has the strides {list(one.stride)}: save it contiguous.")
        nbytes = prod(one.shape) * DTYPE_BYTES.get(one.dtype, 0)
        tensors[tensor] = FolderTensor(name, one.dtype, tuple(one.shape), one.start, one.start + nbytes, turned)
    return tensors
