"""What instruction data becomes as samples, and training on it."""

import json
import logging

import numpy as np
import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.core.datasets.instruction_builder import (
    build_instruction_datasets,
    pad_token_id,
    split_bounds,
    stored_training_samples,
)
from mindspeed_ms.core.datasets.instruction_files import InstructionDataError
from mindspeed_ms.core.datasets.sft_dataset import PairwiseDataset, SFTDataset
from mindspeed_ms.core.datasets.turns import balanced_lengths, kept_positions, turns
from tests.datasets.instruction_data import conversation, neat_pack, write_field, write_sft

IDS, LABELS = [5, 6, 7, 8, 9, 10], [-100, -100, 7, 8, -100, 10]


def test_shift_padding_and_loss_mask(tmp_path):
    dataset = SFTDataset(write_sft(tmp_path / "a", [(IDS, LABELS, [1] * 6)]), 8, 3)
    sample = dataset[0]
    assert sample["tokens"].tolist() == [*IDS, 3, 3]
    assert sample["labels"].tolist() == [0, 7, 8, 0, 10, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert sample["position_ids"].tolist() == list(range(8))
    assert {name: value.dtype for name, value in sample.items()} == {
        "tokens": np.int32,
        "labels": np.int32,
        "loss_mask": np.float32,
        "position_ids": np.int32,
    }
    exact = SFTDataset(str(tmp_path / "a"), 6, 3)[0]
    assert exact["tokens"].tolist() == IDS and exact["labels"].tolist() == [0, 7, 8, 0, 10, 0]


def test_variable_lengths(tmp_path):
    samples = [([7] * length, [-100] + [7] * (length - 1), [1] * length) for length in (3, 5, 9)]
    dataset = SFTDataset(write_sft(tmp_path / "a", samples), 10, 0, shuffle=False, pad_to_multiple_of=4)
    assert dataset.micro_batch([0, 1])["tokens"].shape == (2, 8)
    assert dataset.micro_batch([0])["loss_mask"].tolist() == [[1, 1, 0, 0]]
    assert dataset.micro_batch([2])["tokens"].shape == (1, 10)  # never beyond the sequence length


def test_neat_pack(tmp_path, caplog):
    # without a source, the first token of the second conversation is learnt, but not from the first one
    packed = neat_pack([([5, 6, 7], [-100, 6, 7]), ([8, 9], [8, 9]), ([4], [4])], 8)
    dataset = SFTDataset(write_sft(tmp_path / "a", [packed]), 8, 0, reset_position_ids=True, reset_attention_mask=True)
    sample = dataset[0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert sample["labels"].tolist() == [6, 7, 0, 9, 0, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    numbers = np.array([1, 1, 1, 2, 2, 3, 0, 0])
    allowed = ~sample["attention_mask"][0]
    for query in range(8):
        assert allowed[query].tolist() == [key <= query and numbers[key] == numbers[query] for key in range(8)]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        plain = SFTDataset(str(tmp_path / "a"), 8, 0)[0]
    assert "packed conversations see each other" in caplog.text
    assert "attention_mask" not in plain and plain["position_ids"].tolist() == list(range(8))
    with pytest.raises(InstructionDataError, match="packed to 8 tokens, but seq_length is 6"):
        SFTDataset(str(tmp_path / "a"), 6, 0)


def test_order(tmp_path):
    prefix = write_sft(tmp_path / "a", [([number] * 2, [number] * 2, [1, 1]) for number in range(1, 11)])
    dataset = SFTDataset(prefix, 2, 0, num_samples=25, seed=3)
    drawn = [dataset[index]["tokens"][0] for index in range(25)]
    assert len(dataset) == 25 and sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(1, 11))
    assert drawn[:10] != drawn[10:20]
    assert [SFTDataset(prefix, 2, 0, num_samples=25, seed=3)[index]["tokens"][0] for index in (24, 0)] == [drawn[24], drawn[0]]
    kept = SFTDataset(prefix, 2, 0, num_samples=12, shuffle=False, bounds=(2, 7))
    assert [kept[index]["tokens"][0] for index in range(12)] == [3, 4, 5, 6, 7] * 2 + [3, 4]
    with pytest.raises(IndexError):
        kept[12]


def test_turns_and_cuts():
    labels = np.array([-100, -100, 7, 8, -100, 10, -100])
    assert turns(labels) == [(0, 2, 4), (4, 5, 6), (6, 7, 7)]
    for source, target, limit in [(3, 4, 10), (9, 4, 10), (4, 9, 10), (9, 9, 10), (0, 20, 10), (20, 0, 10), (20, 20, 1)]:
        kept = balanced_lengths(source, target, limit)
        assert sum(kept) <= limit and kept[0] <= source and kept[1] <= target
        assert (sum(kept) == min(limit, source + target)) or (source, target) == (20, 20)
    assert balanced_lengths(9, 4, 10) == (6, 4) and balanced_lengths(4, 9, 10) == (4, 6)
    assert kept_positions(labels, 5).tolist() == [0, 1, 2, 3, 4]
    assert kept_positions(np.array([-100] * 8 + [1, 2]), 6).tolist() == [0, 1, 2, 3, 8, 9]


def test_longer_samples_keep_their_answers(tmp_path, caplog):
    prefix = write_sft(tmp_path / "a", [(list(range(1, 11)), [-100] * 8 + [9, 10], [1] * 10)])
    with caplog.at_level(logging.WARNING):
        sample = SFTDataset(prefix, 6, 0)[0]
    assert "1 of 1 samples are longer than seq_length 6" in caplog.text
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 9, 10] and sample["labels"].tolist() == [0, 0, 0, 9, 10, 0]


def write_pairs(prefix, pairs):
    for index, field in enumerate(("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")):
        write_field(prefix, field, [pair[index] for pair in pairs])
    return str(prefix)


def test_pairs(tmp_path):
    pair = ([1, 2, 3, 4, 5, 6], [-100] * 4 + [5, 6], [1, 2, 3, 4, 7], [-100] * 4 + [7])
    sample = PairwiseDataset(write_pairs(tmp_path / "a", [pair]), 8, 0)[0]
    assert sample["chosen_tokens"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert sample["rejected_labels"].tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
    assert sample["chosen_loss_mask"].sum() == 2 and sample["rejected_loss_mask"].sum() == 1
    cut = PairwiseDataset(str(tmp_path / "a"), 5, 0)[0]
    assert cut["chosen_tokens"].tolist() == [1, 2, 3, 5, 6] and cut["rejected_tokens"].tolist() == [1, 2, 3, 7, 0]


def test_files_that_do_not_fit(tmp_path):
    prefix = write_sft(tmp_path / "a", [(IDS, LABELS, [1] * 6)])
    for name, words in (("b", r"Found in that folder: .*a\."), ("a_packed_input_ids_document", r"Did you mean .*a\?")):
        with pytest.raises(InstructionDataError, match=words):
            SFTDataset(str(tmp_path / name), 8, 0)
    write_field(tmp_path / "a", "labels", [LABELS, LABELS])
    with pytest.raises(InstructionDataError, match="have 2 and 1 sequences"):
        SFTDataset(prefix, 8, 0)
    write_field(tmp_path / "a", "labels", [LABELS[1:]])
    with pytest.raises(InstructionDataError, match="1 sequences of different lengths"):
        SFTDataset(prefix, 8, 0)
    (tmp_path / "a_packed_labels_document.idx").unlink()
    with pytest.raises(InstructionDataError, match="preprocessing did not end"):
        SFTDataset(prefix, 8, 0)
    write_field(tmp_path / "a", "labels", [LABELS])
    with pytest.raises(InstructionDataError, match=r"sample 0 .* has the id 10, but the model's vocabulary has 10 ids"):
        SFTDataset(prefix, 8, 0, vocab_size=10)[0]


def config(folder, dataset=None, parallel=None, **training):
    return init_configs_from_dict(
        {
            "model_config": {
                "vocab_size": 64,
                "num_layers": 2,
                "num_attention_heads": 2,
                "hidden_size": 16,
                "ffn_hidden_size": 32,
                "seq_length": 16,
                "position_embedding_type": "learned_absolute",
                "init_method_std": 0.2,
            },
            "dataset_config": {"is_instruction_dataset": True, "batch_size": 2, "micro_batch_num": 1, **(dataset or {})},
            "parallel_config": parallel or {},
            "training_config": {"training_iters": 12, "output_dir": str(folder), "seed": 3, **training},
            "optimizer_config": {"learning_rate": 0.02},
        }
    )


def test_datasets_of_a_run(tmp_path):
    prefix = write_sft(tmp_path / "a", [(IDS, LABELS, [1] * 6)] * 10)
    train, valid, test = build_instruction_datasets(
        config(tmp_path, {"data_path": [prefix], "split": "8,2,0", "pad_token_id": 9}), (50, 4, 4)
    )
    assert (train.stored, len(train), valid.stored, len(valid), test) == (8, 50, 2, 4, None)
    assert train[0]["tokens"].tolist() == IDS + [9] * 10
    settings = config(tmp_path, {"data_path": [prefix], "split": "8,2,0"})
    assert stored_training_samples(settings) == len(build_instruction_datasets(settings, (0, 0, 0))[0]) == 8
    separate = config(
        tmp_path,
        {
            "train_data_path": [prefix],
            "valid_data_path": [prefix],
            "reset_attention_mask": True,
            "reset_position_ids": True,
            "shuffle": False,
        },
        {"variable_seq_lengths": True},
    )
    assert stored_training_samples(separate) == 10
    train, valid, test = build_instruction_datasets(separate, (20, 4, 4))
    assert (train.stored, valid.stored, test) == (10, 10, None) and not train.shuffle
    assert train[0]["attention_mask"].shape == (1, 8, 8)
    for dataset, words in (
        ({}, "needs data"),
        ({"data_path": [prefix, prefix]}, "instruction data is one prefix"),
        ({"data_path": [prefix], "split": "0,1,0"}, "no sample is left for training"),
    ):
        with pytest.raises(InstructionDataError, match=words):
            build_instruction_datasets(config(tmp_path, dataset), (1, 1, 1))
    odd = config(
        tmp_path,
        {"data_path": [prefix], "pad_to_multiple_of": 7},
        {"variable_seq_lengths": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    )
    with pytest.raises(InstructionDataError, match="must be divisible by 2"):
        build_instruction_datasets(odd, (1, 1, 1))
    assert split_bounds("900,60,40", 120) == [(0, 108), (108, 115), (115, 120)]
    assert pad_token_id(config(tmp_path, {"eos_token_id": 4}).dataset_config) == 4


CONVERSATIONS = [
    conversation(np.random.RandomState(seed), source, target, 64)
    for seed, (source, target) in enumerate([(3, 4), (2, 5), (5, 2), (1, 6)])
]


def losses(folder, samples, reset):
    """Mean loss and tokens of each sample by one and the same untrained model."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from tests.model.builders import start

    dataset = SFTDataset(write_sft(folder, samples), 16, 0, shuffle=False, reset_position_ids=reset, reset_attention_mask=reset)
    all_config = config(folder)
    start(all_config.model_config)
    model = GPTModel(all_config.model_config)
    batches = [dataset.micro_batch([index]) for index in range(len(dataset))]
    return [
        (float(model(**{name: Tensor.from_numpy(value) for name, value in batch.items()}).asnumpy()), batch["loss_mask"].sum())
        for batch in batches
    ]


def train(folder, prefix, reset):
    """Losses of a run on `prefix`."""
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training import build_pretraining_data_loader, get_train_valid_test_num_samples
    from mindspeed_ms.training.training import pretrain
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    all_config = config(folder, {"data_path": [prefix], "reset_position_ids": reset, "reset_attention_mask": reset})
    set_parallel_context(all_config.parallel_config)
    set_seed(all_config.training_config.seed)
    dataset, _, _ = build_instruction_datasets(all_config, get_train_valid_test_num_samples(all_config))
    pretrain(
        None,
        lambda pre_process=True, post_process=True: GPTModel(all_config.model_config),
        None,
        all_config=all_config,
        train_data_loader=build_pretraining_data_loader(dataset, 0, all_config),
    )
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        return [entry["loss"] for entry in map(json.loads, file) if "loss" in entry]


def test_packed_conversations_do_not_see_each_other(world, tmp_path):
    alone = [neat_pack([one], 16) for one in CONVERSATIONS]
    packed = [neat_pack(CONVERSATIONS[:2], 16), neat_pack(CONVERSATIONS[2:], 16)]
    (separate,) = world(1)(losses, tmp_path / "alone", alone, True)
    (together,) = world(1)(losses, tmp_path / "packed", packed, True)
    (mixed,) = world(1)(losses, tmp_path / "mixed", packed, False)
    for number, (loss, tokens) in enumerate(together):
        pair = separate[2 * number : 2 * number + 2]
        assert tokens == sum(count for _, count in pair)
        np.testing.assert_allclose(loss, sum(value * count for value, count in pair) / tokens, rtol=2e-6)
        assert abs(mixed[number][0] - loss) > 1e-3


def test_training_on_packed_conversations(world, tmp_path):
    packed = [neat_pack(CONVERSATIONS[:2], 16), neat_pack(CONVERSATIONS[2:], 16)]
    prefix = write_sft(tmp_path / "packed", packed)
    (tmp_path / "run").mkdir()
    (history,) = world(1)(train, tmp_path / "run", prefix, True)
    assert len(history) == 12 and history[-1] < history[0] / 2, history
