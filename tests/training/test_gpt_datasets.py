"""Megatron's datasets as a configuration names them: provider, data-parallel ranks, resuming, errors."""

import numpy as np
import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.training import gpt_datasets
from mindspeed_ms.training.text_datasets import TextDatasets
from tests.config.samples import with_settings
from tests.datasets.test_indexed_dataset import write


def config(**settings):
    return init_configs_from_dict(with_settings({f"dataset_config.{name}": value for name, value in settings.items()}))


def files(folder, name="x", first=1):
    random = np.random.RandomState(first)
    return write(folder / name, [np.append(random.randint(first, first + 9, 40), 0) for _ in range(60)])


def loaded(settings, consumed, count):
    """Tokens of `count` micro-batches of this rank (runs in a world)."""
    from mindspeed_ms.training.data import build_pretraining_data_loader, get_train_valid_test_num_samples
    from mindspeed_ms.training.utils import set_parallel_context

    all_config = config(**settings)
    set_parallel_context(all_config.parallel_config)
    datasets = gpt_datasets.build_datasets(all_config, get_train_valid_test_num_samples(all_config))
    loader = build_pretraining_data_loader(datasets[0], consumed, all_config)
    return [next(loader)["tokens"] for _ in range(count)], [None if part is None else len(part) for part in datasets]


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_ranks_share_the_samples_and_resume_exactly(world, tmp_path, dataloader_type):
    settings = {
        "data_path": ["0.3", files(tmp_path), "0.7", files(tmp_path, "y", 20)],
        "split": "90,5,5",
        "batch_size": 2,
        "global_batch_size": 8,
        "data_cache_path": str(tmp_path / "cache"),
        "dataloader_type": dataloader_type,
    }
    whole = world(2)(loaded, settings, 0, 12)
    assert whole[0][1] == whole[1][1] and all(whole[0][1])
    resumed = world(2)(loaded, settings, 8 * 2, 8)
    for rank in range(2):
        assert np.array_equal(whole[rank][0][4:], resumed[rank][0])
    if dataloader_type == "single":
        datasets = gpt_datasets.build_datasets(config(**settings), (80, 800, 800))
        inputs = [datasets[0][index]["tokens"] for index in range(24)]
        seen = [row for step in range(6) for rank in range(2) for row in whole[rank][0][step]]
        assert np.array_equal(seen, inputs)


def test_what_is_indexed_and_what_is_text(tmp_path):
    prefix, text = files(tmp_path), tmp_path / "text.txt"
    text.write_text("words")
    assert not gpt_datasets.names_indexed_files(config(data_path=[str(text)]))
    assert not gpt_datasets.names_indexed_files(config())
    for settings in (
        {"data_path": [prefix]},
        {"data_path": ["1", "missing"]},
        {"mock_data": True},
        {"train_data_path": [prefix], "valid_data_path": [prefix]},
    ):
        assert gpt_datasets.names_indexed_files(config(**settings))
    for ending in (".bin", ".idx"):  # small ids may be valid text
        named = config(data_path=[prefix + ending])
        assert gpt_datasets.names_indexed_files(named)
        with pytest.raises(FileNotFoundError, match="Leave the ending out"):
            gpt_datasets.check_files(named)
    with pytest.raises(FileNotFoundError, match=r"missing\.idx"):
        gpt_datasets.check_files(config(data_path=[prefix, "missing"]))
    assert gpt_datasets.gpt_dataset_config(config(mock_data=True)).mock


@pytest.mark.parametrize(("split", "part"), [("0,1,0", "train"), ("1,0.001,0", "valid"), ("99,1,0.001", "test"), ("1", None)])
def test_a_split_without_documents_is_found_before_the_start(tmp_path, split, part):
    prefix, evaluated = files(tmp_path), {"training_config.eval_interval": 1, "training_config.eval_iters": 1}

    def check(**training):
        settings = {"dataset_config.data_path": [prefix], "dataset_config.split": split, **evaluated, **training}
        gpt_datasets.check_files(init_configs_from_dict(with_settings(settings)))

    if part is None:
        check()
        return
    with pytest.raises(DatasetError, match=rf"--split.* of the 60 documents of .*x none is left for {part} data"):
        check()
    if part != "train":
        check(**{"training_config.eval_iters": 0})  # as the message says


def test_what_is_not_needed_is_none_and_what_is_missing_is_told(tmp_path):
    prefix = files(tmp_path)
    train, valid, test = gpt_datasets.build_datasets(config(train_data_path=[prefix]), (9, 9, 9))
    assert len(train) >= 9 and valid is None and test is None
    assert gpt_datasets.build_datasets(config(data_path=[prefix]), (0, 0, 0))[1:] == [None, None]
    with pytest.raises(DatasetError, match="split leaves no documents"):
        gpt_datasets.build_datasets(config(data_path=[prefix], split="0,1,0"), (9, 9, 9))
    with pytest.raises(DatasetError, match="create_attention_mask_in_dataloader False"):
        gpt_datasets.gpt_dataset_config(
            config(data_path=[prefix], reset_attention_mask=True, create_attention_mask_in_dataloader=False)
        )


def test_samples_follow_the_options(tmp_path):
    prefix = files(tmp_path)
    plain = gpt_datasets.build_datasets(config(data_path=[prefix]), (9, 0, 0))[0][0]
    reset = gpt_datasets.build_datasets(
        config(data_path=[prefix], reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True), (9, 0, 0)
    )[0]
    assert "attention_mask" not in plain  # the model applies a causal one
    sample = next(reset[index] for index in range(9) if 0 in reset[index]["tokens"][:-1])
    end = sample["tokens"].tolist().index(0)
    assert sample["loss_mask"][end] == 0 and sample["position_ids"][end + 1] == 0
    assert sample["attention_mask"][0, end + 1, end] and not sample["attention_mask"][0, end, 0]


def test_masks_over_cut_sequences_are_no_matrices(tmp_path):
    """Each data set hands over two numbers for each query; without context parallelism Megatron's matrix."""
    settings = {f"dataset_config.{name}": True for name in ("reset_attention_mask", "reset_position_ids")}
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of the text\n" for number in range(400)))
    for path, make in ((files(tmp_path), lambda made: gpt_datasets.build_datasets(made, (9, 0, 0))), (str(text), text_parts)):
        shapes = []
        for size in (1, 2):
            cut = {"parallel_config.context_parallel_size": size, "training_config.output_dir": str(tmp_path / "output")}
            named = {
                **settings,
                **cut,
                "model_config.vocab_size": 512,
                "dataset_config.data_path": [path],
                "model_config.attention_dropout": 0.0,
            }
            made = init_configs_from_dict(with_settings(named))
            shapes.append(make(made)[0][0]["attention_mask"].shape)
        length = made.model_config.seq_length
        assert shapes == [(1, length, length), (1, length, 2)]


def text_parts(all_config):
    return TextDatasets(all_config)((9, None, None))
