"""Manifest of a checkpoint: stored tensors by global name with files and byte ranges, counters, configuration.

One JSON object, protected by its own check sum:

    {"format": "mindspeed_ms", "format_version": 3, "iteration": 100, "saved_at": 1764300000.0,
     "layout": {"tensor": 2, "pipeline": 2, ...}, "vocab_size": 50257,
     "states": {"train_state": {...}, "opt_param_scheduler": {...}, "optimizer": {"step": 100, "grad_scaler": {...}}},
     "args": {...the configuration...}, "fingerprint": {"tokenizer": {...}, "data": {...}},
     "tensors": {KEY: {"shape": [...], "dtype": "bfloat16", "grouping": "qkv", "pieces": [
         {"file": "state_00000.safetensors", "bytes": [start, stop], "axis": 0, "ranges": [[0, 64]], "flat": [0, 512],
          "xxhash": "...", "multilinear": "..."}]}},
     "files": {"state_00000.safetensors": bytes}, "ranks": [{"file": "rank_00000.json", "bytes": n, "xxhash": "...",
     "coordinates": {"tp": 0, "pp": 0, "dp": 0, ...}}], "xxhash": "..."}

KEY is the state-dict key of a weight with the global layer (and expert) index, or `optimizer.state.NAME.KEY` for NAME
exp_avg, exp_avg_sq, momentum_buffer and fp32_param (float32 masters of half-precision weights). Tied copies of an
embedding are stored once, under the original's key. A piece holds, row-major, elements `flat` of the local tensor that
`axis` and `ranges` cut out of the global one (`layout.sharding.FlatSlice`); left out, they mean everything. `leading` is
the part of the first axis that is held where that is cut too (a tensor of all experts). A piece has two check sums: xxh3 for
a reader of the whole piece, and `multilinear` (see there), which ranks that read parts of it add up. Manifests of foreign
folders (`foreign`) may also hold `transposed` pieces: in the file, the last two axes of the local tensor are swapped.
"""

import json
import os
from dataclasses import dataclass, field

import xxhash

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding

MANIFEST_FILE = "manifest.json"
FORMAT = "mindspeed_ms"
FORMAT_VERSION = 3
OPTIMIZER_PREFIX = "optimizer.state."
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_HASH_TAIL = ', "xxhash": "%s"}'


def optimizer_key(state_name, key):
    """Key of the optimizer state `name` (exp_avg, ...) of the weight `key`."""
    return f"{OPTIMIZER_PREFIX}{state_name}.{key}"


def digest(data):
    """Check sum of the format: xxh3 with 64 bits, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def whole_slice(sharding):
    """FlatSlice of all elements of a local tensor."""
    return FlatSlice(sharding, 0, sharding.numel)


@dataclass(frozen=True)
class StoredPiece:
    """Part of a stored tensor in one file.

    Attributes:
        slice (FlatSlice): which elements of the global tensor.
        file (str): name in the checkpoint's folder.
        start, stop (int): bytes of the file.
        xxhash, multilinear (str): check sums of these bytes; "" if none was saved (files that others wrote).
        transposed (bool): the last two axes of the local tensor are swapped in the file; only a whole local tensor can be.
        form (Optional[object]): of what other programs store in another form: `form.local(read)` gives the whole local tensor,
            see `models.hugging_face.stored_form`. Not written.
    """

    slice: FlatSlice
    file: str
    start: int
    stop: int
    xxhash: str
    multilinear: str
    transposed: bool = False
    form: object = None

    def to_json(self):
        """Plain (JSON) form of the piece."""
        result = {"file": self.file, "bytes": [self.start, self.stop], "xxhash": self.xxhash, "multilinear": self.multilinear}
        sharding = self.slice.sharding
        if sharding.axis is not None:
            result["axis"], result["ranges"] = sharding.axis, [list(part) for part in sharding.ranges]
            if sharding.leading is not None:
                result["leading"] = list(sharding.leading)
        if (self.slice.start, self.slice.stop) != (0, sharding.numel):
            result["flat"] = [self.slice.start, self.slice.stop]
        return {**result, "transposed": True} if self.transposed else result

    @classmethod
    def from_json(cls, shape, value):
        """Piece from its plain form; `shape` is that of the global tensor."""
        ranges = tuple((start, stop) for start, stop in value.get("ranges", ()))
        leading = tuple(value["leading"]) if "leading" in value else None
        sharding = ParameterSharding(shape, value.get("axis"), ranges, leading)
        start, stop = value.get("flat", (0, sharding.numel))
        checked = value["xxhash"], value["multilinear"], value.get("transposed", False)
        return cls(FlatSlice(sharding, start, stop), value["file"], *value["bytes"], *checked)


@dataclass
class StoredTensor:
    """Global tensor with its stored pieces.

    Attributes:
        shape (tuple[int]): of the whole.
        dtype (str): "float32", "bfloat16", "float16", ...
        grouping (Optional[str]): what the rows mean, see `layout.ParameterDescription`; "vocab" rows may be padding.
        pieces (list[StoredPiece]): its parts; they may repeat elements, with equal values.
    """

    shape: tuple
    dtype: str
    grouping: str | None = None
    pieces: list = field(default_factory=list)

    @property
    def itemsize(self):
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    def to_json(self):
        """Plain (JSON) form of the tensor."""
        result = {"shape": list(self.shape), "dtype": self.dtype, "pieces": [piece.to_json() for piece in self.pieces]}
        return {**result, "grouping": self.grouping} if self.grouping else result

    @classmethod
    def from_json(cls, value):
        """Tensor from its plain form."""
        shape = tuple(value["shape"])
        pieces = [StoredPiece.from_json(shape, piece) for piece in value["pieces"]]
        return cls(shape, value["dtype"], value.get("grouping"), pieces)


@dataclass
class Manifest:
    """Manifest of a checkpoint: all of its content except the tensors' values.

    Attributes:
        iteration (int): of the training.
        tensors (dict[str, StoredTensor]): by key.
        states (dict): train_state, opt_param_scheduler, optimizer; None for a state that was not saved.
        layout (dict[str, int]): sizes: tensor, pipeline, virtual_pipeline, data, context, expert, world.
        vocab_size (Optional[int]): rows of "vocab" tensors that are no padding.
        args (dict): the configuration.
        fingerprint (Optional[dict]): of tokenizer and data, see `training.same_data`; None: the writer kept none.
        files (dict[str, int]): bytes of each file with tensors.
        ranks (list[dict]): file, bytes, xxhash and coordinates of each rank's own states.
        saved_at (float): seconds since 1970.
        foreign (dict): what another program saved beside, kept for the way back, by the program's name.
        replicas (list[(str, StoredPiece, StoredPiece)]): key and two places that must hold the same values; not saved.
    """

    iteration: int
    tensors: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)
    vocab_size: int | None = None
    args: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    ranks: list = field(default_factory=list)
    saved_at: float = 0.0
    fingerprint: dict | None = None
    foreign: dict = field(default_factory=dict)
    replicas: list = field(default_factory=list)
    # why a training cannot go on from it; "" if it can
    not_resumable = ""
    # whether the headers of its files name tensors by their keys
    has_keys_in_files = True

    @property
    def has_only_weights(self):
        """Whether it holds weights of another program, converted or not, without any state of a training."""
        trained = self.iteration or self.fingerprint is not None
        return not trained and not any(key.startswith(OPTIMIZER_PREFIX) for key in self.tensors)

    def to_bytes(self):
        """Content of the manifest file."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "saved_at": self.saved_at,
            "layout": self.layout,
            "vocab_size": self.vocab_size,
            "states": self.states,
            "args": self.args,
            "fingerprint": self.fingerprint,
            "files": self.files,
            "ranks": self.ranks,
            "tensors": {key: tensor.to_json() for key, tensor in self.tensors.items()},
        }
        if self.foreign:
            content["foreign"] = self.foreign
        text = json.dumps(content).encode()
        return text[:-1] + (_HASH_TAIL % digest(text)).encode()

    @classmethod
    def from_bytes(cls, data, path):
        """Manifest from the content of its file; `path` is for messages.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        tail = len(_HASH_TAIL % ("0" * 16))
        if data[-tail:] != (_HASH_TAIL % digest(data[:-tail] + b"}")).encode():
            raise DamagedCheckpointError(f"{path} is damaged: its check sum is wrong.")
        content = json.loads(data)
        if content.get("format") != FORMAT or content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {content.get('format')!r} version {content.get('format_version')}: "
                f"expected {FORMAT!r} version {FORMAT_VERSION}."
            )
        names = ("iteration", "saved_at", "layout", "vocab_size", "states", "args", "files", "ranks")
        return cls(
            tensors={key: StoredTensor.from_json(value) for key, value in content["tensors"].items()},
            **{name: content[name] for name in names},
            fingerprint=content.get("fingerprint"),
            foreign=content.get("foreign", {}),
        )

    @classmethod
    def read(cls, folder):
        """Read the manifest in a checkpoint's folder.

        Raises:
            CheckpointError: none there, damaged, or of another format.
        """
        path = os.path.join(folder, MANIFEST_FILE)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{folder} is incomplete: it has no {MANIFEST_FILE}.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls.from_bytes(data, path)
