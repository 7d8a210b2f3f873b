"""Megatron's .bin and .idx files: byte-equal, never wrapped, never half written, damage told."""

import hashlib
import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_ms.core.datasets import indexed_format
from mindspeed_ms.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    best_fitting_dtype,
)
from tests.datasets.golden import data_folder

DOCUMENTS = [[3, 1, 4, 1], [5], [9, 2, 6, 5, 3], [5, 8]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize(f"{prefix}.idx")
    return f"{prefix}"


def test_files_are_byte_equal_to_megatron(tmp_path):
    prefix = write(tmp_path / "small")
    content = Path(prefix + ".idx").read_bytes() + Path(prefix + ".bin").read_bytes()
    # of the files that megatron-core 0.12.1 writes for the same documents
    assert hashlib.sha256(content).hexdigest() == "59467c9f801491afe4bf97d0d87d62e911d809b52a051fdb1730c255c8963c9a"


def test_recorded_files(tmp_path):
    folder = data_folder()
    recorded = np.load(folder / "tokens_idx_dump.npz")
    names = [path.stem for path in sorted(folder.glob("*.idx"))]
    assert names
    for name in names:
        for mmap in (True, False):
            dataset = IndexedDataset(folder / name, mmap=mmap)
            assert np.dtype(dataset.dtype).name == str(recorded[f"{name}/dtype"])
            for attribute in ("sequence_lengths", "document_indices", "sequence_pointers"):
                assert np.array_equal(getattr(dataset, attribute), recorded[f"{name}/{attribute}"])
            assert np.array_equal(np.concatenate(dataset[:]), recorded[f"{name}/tokens"])
        copy = write(tmp_path / name, [sequence.tolist() for sequence in dataset], dataset.dtype)
        for ending in (".bin", ".idx"):
            assert Path(copy + ending).read_bytes() == (folder / (name + ending)).read_bytes()


def test_recorded_merge(tmp_path):
    folder = data_folder()
    recorded = np.load(folder / "tokens_idx_dump.npz")
    with IndexedDatasetBuilder(tmp_path / "m.bin", np.uint16) as builder:
        for name in "ab":
            builder.add_index(folder / f"{name}_gpt2bpe_text_document")
        builder.finalize(tmp_path / "m.idx")
    merged = IndexedDataset(tmp_path / "m")
    for attribute in ("sequence_lengths", "document_indices", "sequence_pointers"):
        assert np.array_equal(getattr(merged, attribute), recorded[f"ab_merged/{attribute}"])
    assert np.array_equal(np.concatenate(merged[:]), recorded["ab_merged/tokens"])


@given(
    documents=st.lists(st.lists(st.lists(st.integers(-128, 127), max_size=5), max_size=3), max_size=6),
    mmap=st.booleans(),
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64, np.float32, np.float64]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, mmap, dtype):
    prefix = str(tmp_path_factory.mktemp("data") / "x")
    with IndexedDatasetBuilder(prefix + ".bin", dtype) as builder:
        for number, sequences in enumerate(documents):
            if number % 2:
                builder.add_document([token for sequence in sequences for token in sequence], list(map(len, sequences)))
            else:
                for sequence in sequences:
                    builder.add_item(sequence)
                builder.end_document()
        builder.finalize(prefix + ".idx")
    dataset = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap)))
    sequences = [sequence for document in documents for sequence in document]
    assert IndexedDataset.exists(prefix) and len(dataset) == len(sequences) and dataset.dtype is dtype
    assert [sequence.tolist() for sequence in dataset[:]] == sequences
    assert dataset.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    for index, sequence in enumerate(sequences):
        for offset in range(len(sequence) + 1):
            assert dataset.get(index, offset).tolist() == sequence[offset:]
            assert (
                dataset.get(index, offset, (len(sequence) - offset) // 2).tolist()
                == (sequence[offset : offset + (len(sequence) - offset) // 2])
            )
        with pytest.raises(IndexError, match=f"which has {len(sequence)}"):
            dataset.get(index, 0, len(sequence) + 1)
    with pytest.raises(IndexError):
        dataset[len(sequences)]


def test_dtype_by_vocabulary():
    assert [best_fitting_dtype(size) for size in (1, 65499, 65500, 2**31, None)] == [
        np.uint16,
        np.uint16,
        np.int32,
        np.int32,
        np.int32,
    ]
    with pytest.raises(IndexedDatasetError, match="2147483649 ids"):
        DType.optimal_dtype(2**31 + 1)
    with pytest.raises(IndexedDatasetError, match="cannot hold uint32"):
        DType.code_from_dtype(np.uint32)


@pytest.mark.parametrize(
    "dtype, ids, message",
    [
        (np.uint16, [1, 65536], "token id 65536 does not fit uint16"),
        (np.uint16, [-1, 3], "token id -1 does not fit uint16"),
        (np.int32, np.array([2**31]), "token id 2147483648 does not fit int32"),
        (np.uint16, np.array([1.5]), "are float64: expected integers"),
        (np.uint16, [[1]], "expected one dimension"),
    ],
)
def test_an_id_never_wraps(tmp_path, dtype, ids, message):
    with pytest.raises(IndexedDatasetError, match=message), IndexedDatasetBuilder(tmp_path / "x.bin", dtype) as builder:
        builder.add_document(ids)
    assert os.listdir(tmp_path) == []


def test_a_half_written_file_is_never_seen(tmp_path):
    prefix = write(tmp_path / "x")
    before = Path(prefix + ".bin").read_bytes()
    with (
        pytest.raises(IndexedDatasetError, match=r"sequences of \[1\] tokens"),
        IndexedDatasetBuilder(prefix + ".bin") as builder,
    ):
        builder.add_document([1], [1])
        builder.add_document([1, 2], [1])
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"] and Path(prefix + ".bin").read_bytes() == before
    with (
        pytest.raises(IndexedDatasetError, match="uint16 tokens: expected int32"),
        IndexedDatasetBuilder(prefix + ".bin") as builder,
    ):
        builder.add_index(prefix)
    with pytest.raises(OSError, match="No such file"):
        IndexedDatasetBuilder(tmp_path / "missing" / "x.bin")


def test_full_disk(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "x.bin")
    builder._bin._file.close()
    builder._bin._file = open("/dev/full", "wb")  # noqa: SIM115
    builder.add_document([1, 2, 3])
    with pytest.raises(OSError, match=r"No space left on device.*unfinished file was deleted.*x.bin"):
        builder.finalize(tmp_path / "x.idx")
    assert os.listdir(tmp_path) == []


def patched(data, position, form, value):
    data = bytearray(data)
    struct.pack_into(form, data, position, value)
    return bytes(data)


LENGTHS, POINTERS, ENDS = 34, 34 + 4 * 4, 34 + 12 * 4
DAMAGED_INDEX = {
    "empty": (lambda data: b"", "does not begin with"),
    "another file": (lambda data: b"TNTIDX\0\0" + data, "very old TNTIDX"),
    "header": (lambda data: data[:20], "truncated: it has 20 bytes, its header alone needs 34"),
    "cut": (lambda data: data[:-1], "truncated: 4 sequences and 5 document indices need 122 bytes, it has 121"),
    "longer": (lambda data: data + b"12", "is damaged: 4 sequences"),
    "multimodal": (lambda data: data + b"1234", "multimodal"),
    "version": (lambda data: patched(data, 9, "<Q", 2), "version 2: expected 1"),
    "dtype": (lambda data: patched(data, 17, "<B", 9), r"dtype code 9: expected 1 \(uint8\)"),
    "huge count": (lambda data: patched(data, 18, "<Q", 2**60), "truncated"),
    "negative length": (lambda data: patched(data, LENGTHS + 4, "<i", -1), "sequence 1 has -1 tokens"),
    "pointers": (
        lambda data: patched(data, POINTERS + 16, "<q", 4),
        "sequence 2 has 5 tokens and begins at byte 4, the one before it ends at byte 10",
    ),
    "middle of a token": (lambda data: patched(data, POINTERS + 24, "<q", 21), "sequence 3 has 2 tokens and begins at byte 21"),
    "beyond the end": (lambda data: patched(data, LENGTHS + 12, "<i", 3), "has 24 bytes, .* end at byte 26; sequence 3 of 4"),
    "last document": (lambda data: patched(data, ENDS + 32, "<q", 5), r"rise from 0 to 4 .* from 0 to 5"),
    "falling documents": (lambda data: patched(data, ENDS + 8, "<q", 3), "must rise from 0 to 4"),
}


@pytest.mark.parametrize("name", DAMAGED_INDEX)
def test_damaged_index(tmp_path, name):
    damage, message = DAMAGED_INDEX[name]
    prefix = write(tmp_path / "x")
    data = Path(prefix + ".idx").read_bytes()
    Path(prefix + ".idx").write_bytes(damage(data))
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_what_lies_between_sequences_is_told(tmp_path, caplog, monkeypatch, at_once):
    """A length that damage made zero leaves a gap; a document without tokens, as Megatron's writer makes it, does not."""
    monkeypatch.setattr(indexed_format, "_CHECKED_AT_ONCE", at_once)
    prefix = write(tmp_path / "x", [[], *DOCUMENTS[:2], [], *DOCUMENTS[2:], []])
    assert [len(sequence) for sequence in IndexedDataset(prefix)] == [0, 4, 1, 0, 5, 2, 0] and not caplog.text
    data = Path(prefix + ".idx").read_bytes()
    Path(prefix + ".idx").write_bytes(patched(patched(data, 34 + 4, "<i", 0), 34 + 16, "<i", 4))
    assert IndexedDataset(prefix)[2].tolist() == DOCUMENTS[1]
    assert (
        "leaves out bytes of" in caplog.text
        and "at 2 places" in caplog.text
        and "sequence 2 has 1 tokens and begins at byte 8, the one before it ends at byte 0" in caplog.text
    )


def test_damaged_tokens(tmp_path, caplog):
    prefix = write(tmp_path / "x")
    data = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(data[:9])
    with pytest.raises(IndexedDatasetError, match=r"truncated: it has 9 bytes, .* end at byte 24; sequence 1 of 4"):
        IndexedDataset(prefix)
    Path(prefix + ".bin").write_bytes(data + b"12")
    IndexedDataset(prefix)
    assert "has 26 bytes" in caplog.text
    os.remove(prefix + ".bin")
    with pytest.raises(FileNotFoundError, match=re.escape(prefix + ".bin")):
        IndexedDataset(prefix)
    with pytest.raises(IndexedDatasetError, match="multimodal"):
        IndexedDataset(prefix, multimodal=True)


def test_advice_on_a_wrong_prefix(tmp_path):
    prefix = write(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=re.escape(f"Leave the ending out: {prefix}.")):
        IndexedDataset(prefix + ".bin")
    for number in range(2):
        write(f"{prefix}_{number}_text_document")
    (tmp_path / "x_half.idx").write_bytes(b"")
    os.remove(prefix + ".idx")
    os.remove(prefix + ".bin")
    for ending in ("", ".bin", ".idx"):
        with pytest.raises(
            FileNotFoundError, match=re.escape(f"Did you mean {prefix}_0_text_document or {prefix}_1_text_document?")
        ):
            IndexedDataset(prefix + ending)
    write(tmp_path / "chat_packed_input_ids_document")
    with pytest.raises(FileNotFoundError, match="chat names conversations: train on them with --is-instruction-dataset"):
        IndexedDataset(tmp_path / "chat")
    (tmp_path / "text").write_text("words")
    with pytest.raises(FileNotFoundError, match="text must be preprocessed first"):
        IndexedDataset(tmp_path / "text")
