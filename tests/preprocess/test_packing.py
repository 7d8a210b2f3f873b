"""Packed sequences: every token once, upstream's order, no sample that is lost or loops for ever."""

import numpy as np
import pytest

from mindspeed_ms.tasks.preprocess.packing import plan
from tests.preprocess.runs import run, stored, write_jsonl
from tests.preprocess.toy_tokenizer import toy_tokenizer


def greedy(lengths, seq_length):
    """The rule, done slowly."""
    left = sorted(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    while left:
        sequence, room = [left.pop()], None
        room = seq_length - 1 - lengths[sequence[0]]
        while True:
            fitting = [sample for sample in left if lengths[sample] <= room]
            if not fitting:
                break
            left.remove(fitting[-1])
            sequence.append(fitting[-1])
            room -= lengths[fitting[-1]]
        yield sequence


@pytest.mark.parametrize("seed", range(8))
def test_plan_is_the_greedy_rule(seed):
    random = np.random.default_rng(seed)
    seq_length = int(random.integers(2, 40))
    lengths = random.integers(1, seq_length + 1, random.integers(1, 80)).astype(np.int32)
    assert list(plan(lengths, seq_length)) == list(greedy(lengths.tolist(), seq_length))


@pytest.mark.parametrize("neat", [False, True])
def test_packed_files(tmp_path, capsys, neat):
    records = [{"instruction": "how " * (n % 7 + 1), "output": "fine " * (n % 4 + 1)} for n in range(40)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    words = ["--input", path, "--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen"]
    assert run(capsys, tmp_path, *words, prefix="plain/set")[0] == 0
    keys = ("input_ids", "labels", "attention_mask")
    plain = {key: stored(tmp_path, f"plain/set_packed_{key}_document") for key in keys}
    longest = max(map(len, plain["input_ids"]))
    for length in (longest, longest + 1, 3 * longest):
        packing = ["--pack", "--seq-length", length, "--overwrite-output", *(["--neat-pack"] if neat else [])]
        code, printed = run(capsys, tmp_path, *words, *packing)
        assert code == 0 and "packed 40 samples into" in printed, printed
        packed = {key: np.array(stored(tmp_path, f"out/set_packed_{key}_document")) for key in keys}
        assert {array.shape[1] for array in packed.values()} == {length}
        tokens = sum(map(len, plain["input_ids"]))
        for key in keys:  # what is in the files, and what in the packs
            packs = f"{key}: {len(packed[key]):,} packs of {length:,} tokens, which hold 40 samples, {tokens:,} tokens"
            assert packs in printed.splitlines()
        check(packed, plain, neat, toy_tokenizer(tmp_path).token_to_id("<|im_end|>"))


def check(packed, plain, neat, end):
    """Each sample stands there once, with its labels; what is left is padding."""
    found = []
    lengths = [len(ids) for ids in plain["input_ids"]]
    sequences = list(plan(np.array(lengths, np.int32), packed["input_ids"].shape[1]))
    assert len(sequences) == len(packed["input_ids"])
    for row, sequence in enumerate(sequences):
        position = 0
        for number, sample in enumerate(sequence, 1):
            place = slice(position, position + lengths[sample])
            for key in ("input_ids", "labels"):
                assert packed[key][row, place].tolist() == plain[key][sample]
            assert set(packed["attention_mask"][row, place].tolist()) == {number if neat else 1}
            position += lengths[sample]
            found.append(sample)
        assert set(packed["labels"][row, position:].tolist()) <= {-100}
        assert set(packed["input_ids"][row, position:].tolist()) <= {end}
        assert set(packed["attention_mask"][row, position:].tolist()) <= {0 if neat else 1}
    assert sorted(found) == list(range(len(lengths)))
