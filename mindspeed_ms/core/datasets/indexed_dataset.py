"""IndexedDataset and its builder: read and write Megatron's indexed token files; `indexed_format` describes the format."""

import glob
import operator
import os
from array import array

import numpy as np

from mindspeed_ms.core.datasets.indexed_format import (
    HEADER,
    MAGIC,
    VERSION,
    DType,
    IndexedDatasetError,
    best_fitting_dtype,
    check_sequences,
    get_bin_path,
    get_idx_path,
    read_index,
    sequence_pointers,
)

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedDatasetError",
    "best_fitting_dtype",
    "get_bin_path",
    "get_idx_path",
]

_NAMED = 3  # of the names that come near a wrong one
_COPIED_AT_ONCE = 1 << 24


class IndexedDataset:
    """Token sequences of `path_prefix.bin` and `.idx`, read on demand. May be forked and pickled.

    Args:
        path_prefix (str): path without the ending.
        multimodal (bool): must be False.
        mmap (bool): map the tokens into memory; else each access reads from the file.

    Attributes:
        dtype (type): numpy type of the tokens.
        itemsize (int): bytes of a token.
        sequence_lengths (np.ndarray): int32 `[sequences]`, in tokens.
        sequence_pointers (np.ndarray): int64 `[sequences]`, in bytes.
        document_indices (np.ndarray): int64 `[documents + 1]`, the first sequence of each document, and the end.

    Raises:
        FileNotFoundError: a file is missing.
        IndexedDatasetError: a file is damaged or multimodal.
    """

    def __init__(self, path_prefix, multimodal=False, mmap=True):
        self.path_prefix = os.fspath(path_prefix)
        self.mmap = mmap
        if multimodal:
            raise IndexedDatasetError(
                f"{self.path_prefix}: multimodal files (with a mode of each sequence) cannot be read: expected text only."
            )
        self._open()

    def _open(self):
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        for path in (idx_path, bin_path):
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"{path} does not exist: an indexed dataset is named by its prefix and has two files, "
                    f"{os.path.basename(bin_path)} and {os.path.basename(idx_path)}."
                    f"{_advice(self.path_prefix)}"
                )
        self.dtype, self.sequence_lengths, self.sequence_pointers, self.document_indices = read_index(idx_path)
        self.itemsize = np.dtype(self.dtype).itemsize
        size = os.path.getsize(bin_path)
        check_sequences(self, idx_path, bin_path, size)
        self._tokens = self._file = None
        if self.mmap:
            self._tokens = np.memmap(bin_path, np.uint8, "r") if size else np.empty(0, np.uint8)
        else:
            self._file = open(bin_path, "rb", buffering=0)  # noqa: SIM115  as long as the dataset lives

    def __getstate__(self):
        return {"path_prefix": self.path_prefix, "mmap": self.mmap}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, index):
        """Tokens of a sequence (read-only array); for a slice a list of arrays."""
        if isinstance(index, slice):
            return [self.get(number) for number in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, idx, offset=0, length=None):
        """Tokens of a part of a sequence.

        Args:
            idx (int): sequence.
            offset (int): first token.
            length (Optional[int]): number of tokens; None: up to the end.

        Returns:
            np.ndarray: read-only, `[length]`.

        Raises:
            IndexError: no such sequence, or the part is not inside it.
        """
        idx = operator.index(idx)
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of {self.path_prefix}, which has {len(self)}")
        available = int(self.sequence_lengths[idx])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) of sequence {idx} of {self.path_prefix}, which has {available}"
            )
        return self._read(int(self.sequence_pointers[idx]) + int(offset) * self.itemsize, int(length))

    def _read(self, position, count):
        if self._tokens is not None:
            return np.frombuffer(self._tokens, self.dtype, count, position) if count else np.empty(0, self.dtype)
        data, size = [], count * self.itemsize
        while size:
            data.append(os.pread(self._file.fileno(), size, position))
            if not data[-1]:
                raise IndexedDatasetError(f"{get_bin_path(self.path_prefix)} became shorter while it was read.")
            size, position = size - len(data[-1]), position + len(data[-1])
        return np.frombuffer(b"".join(data), self.dtype)

    @staticmethod
    def exists(path_prefix):
        """Whether both files of a prefix exist."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(get_bin_path(path_prefix))


def _advice(path_prefix):
    """Advice about a prefix without indexed files, for an error message."""
    stem, ending = os.path.splitext(path_prefix)
    if ending in (".bin", ".idx"):
        return f" Leave the ending out: {stem}." if IndexedDataset.exists(stem) else _advice(stem)
    if os.path.exists(path_prefix):
        return f" {path_prefix} itself is other data: text must be preprocessed first, and only indexed files take weights."
    if os.path.exists(get_idx_path(path_prefix)) or os.path.exists(get_bin_path(path_prefix)):
        return ""  # half a pair
    longer = [path[: -len(".idx")] for path in sorted(glob.glob(glob.escape(path_prefix) + "*.idx"))]
    longer = [prefix for prefix in longer if IndexedDataset.exists(prefix)]
    if not longer:
        return ""
    if f"{path_prefix}_packed_input_ids_document" in longer:
        return f" {path_prefix} names conversations: train on them with --is-instruction-dataset."
    return f" Did you mean {' or '.join(longer[:_NAMED])}{', ...' if len(longer) > _NAMED else ''}?"


class IndexedDatasetBuilder:
    """Writes indexed files, byte-equal to Megatron's. They appear under their names, whole, when `finalize` is called; as a
    context manager it deletes unfinished files.

    Args:
        bin_path (str): path of the `.bin` file.
        dtype (type): of the tokens, see `best_fitting_dtype`.
        multimodal (bool): must be False.

    Raises:
        IndexedDatasetError: a dtype that the format does not know.
        OSError: the folder is missing, read-only or full; nothing is left behind.
    """

    def __init__(self, bin_path, dtype=np.int32, multimodal=False):
        if multimodal:
            raise IndexedDatasetError("multimodal files cannot be written: expected text only.")
        DType.code_from_dtype(dtype)
        self.dtype = np.dtype(dtype)
        self.sequence_lengths = array("i")
        self.document_indices = array("q", [0])
        self._bin = _NewFile(bin_path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bin.discard()

    def add_item(self, ids):
        """Append one sequence, without ending its document.

        Args:
            ids (Sequence[int] or np.ndarray): one-dimensional.

        Raises:
            IndexedDatasetError: an id does not fit the dtype: ids never wrap.
        """
        tokens = self._converted(ids)
        self._bin.write(tokens.tobytes())
        self.sequence_lengths.append(len(tokens))

    def add_document(self, ids, lengths=None):
        """Append a document.

        Args:
            ids (Sequence[int] or np.ndarray): its tokens, one-dimensional.
            lengths (Optional[list[int]]): tokens of each of its sequences; None: it is one sequence.

        Raises:
            IndexedDatasetError: an id does not fit the dtype, or the lengths do not add up to the ids.
        """
        tokens = self._converted(ids)
        lengths = [len(tokens)] if lengths is None else lengths
        if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
            raise IndexedDatasetError(f"sequences of {list(lengths)} tokens do not make up a document of {len(tokens)}.")
        self._bin.write(tokens.tobytes())
        self.sequence_lengths.extend(lengths)
        self.end_document()

    def end_document(self):
        """End the document: it holds the sequences since the last end."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix):
        """Append all of another indexed dataset.

        Raises:
            IndexedDatasetError: it has another dtype, or is damaged.
        """
        other = IndexedDataset(path_prefix)
        if np.dtype(other.dtype) != self.dtype:
            raise IndexedDatasetError(
                f"{path_prefix} has {np.dtype(other.dtype)} tokens: expected {self.dtype}, as the files "
                "before it. Preprocess them with the same tokenizer."
            )
        offset = len(self.sequence_lengths)
        if np.array_equal(other.sequence_pointers, sequence_pointers(other.sequence_lengths, self.dtype)):
            tokens = int(other.sequence_lengths.sum(dtype=np.int64))
            self._bin.copy_from(get_bin_path(path_prefix), tokens * self.dtype.itemsize)
        else:
            for sequence in other:
                self._bin.write(sequence.tobytes())
        self.sequence_lengths.frombytes(other.sequence_lengths.tobytes())
        self.document_indices.frombytes((other.document_indices[1:] + offset).tobytes())

    def finalize(self, idx_path):
        """Write the index; both files get their names.

        Args:
            idx_path (str): path of the `.idx` file.
        """
        lengths = np.frombuffer(self.sequence_lengths, np.int32) if self.sequence_lengths else np.empty(0, np.int32)
        documents = np.frombuffer(self.document_indices, np.int64)
        header = HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(self.dtype), len(lengths), len(documents))
        try:
            index = _NewFile(idx_path)
            try:
                for part in (header, lengths, sequence_pointers(lengths, self.dtype), documents):
                    index.write(part)
                self._bin.complete()
                index.complete()
                self._bin.publish()
                index.publish()
            finally:
                index.discard()
        finally:
            self._bin.discard()

    def _converted(self, ids):
        tokens = np.asarray(ids)
        if tokens.ndim != 1:
            raise IndexedDatasetError(f"token ids have shape {tokens.shape}: expected one dimension.")
        if tokens.dtype == self.dtype or not tokens.size:
            return tokens.astype(self.dtype, copy=False)
        if self.dtype.kind == "f":
            return tokens.astype(self.dtype)
        if tokens.dtype.kind not in "iu":
            raise IndexedDatasetError(f"token ids are {tokens.dtype}: expected integers.")
        smallest, largest, bounds = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
        if smallest < bounds.min or largest > bounds.max:
            raise IndexedDatasetError(
                f"token id {largest if largest > bounds.max else smallest} does not fit {self.dtype} "
                f"([{bounds.min}, {bounds.max}]): the vocabulary is larger than was said when the file "
                "was begun; count added tokens too."
            )
        return tokens.astype(self.dtype)


class _NewFile:
    """File that gets its name once it is complete; after a failed write it is deleted."""

    def __init__(self, path):
        self.path = os.fspath(path)
        self._temporary = f"{self.path}.{os.getpid()}.{os.urandom(4).hex()}.partial"
        self._file = open(self._temporary, "wb")  # noqa: SIM115  closed by complete or discard

    def write(self, data):
        self._do(lambda: self._file.write(data))

    def copy_from(self, path, size):
        """Append the first `size` bytes of a file."""

        def copy():
            left = size
            with open(path, "rb") as source:
                while left:
                    data = source.read(min(left, _COPIED_AT_ONCE))
                    if not data:
                        raise IndexedDatasetError(f"{path} became shorter while it was read.")
                    self._file.write(data)
                    left -= len(data)

        self._do(copy)

    def complete(self):
        """Flush and sync all data to the disk."""

        def complete():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

        self._do(complete)

    def publish(self):
        """Rename the file to its final name."""
        os.replace(self._temporary, self.path)

    def discard(self):
        """Delete the file unless it was published."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk: the data that could not be flushed is not wanted
        if os.path.exists(self._temporary):
            os.remove(self._temporary)

    def _do(self, action):
        try:
            action()
        except OSError as error:
            self.discard()
            raise OSError(error.errno, f"{os.strerror(error.errno)} (the unfinished file was deleted)", self.path) from error
