"""A training starts from a Hugging Face folder as it is: its model from config.json, each rank its own slices."""

import numpy as np
import pytest

from mindspeed_ms.config import argument_parser, init_configs_from_args
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.model import builders

TRAINING = "--use-checkpoint-args --seq-length 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 0.01".split()
PARTS = {"one": (), "tp2": ("--tensor-model-parallel-size", "2"), "pp2": ("--pipeline-model-parallel-size", "2")}


def config_of(folder, *words):
    return init_configs_from_args(argument_parser().parse_args([*TRAINING, "--load", folder, *words]))


def load(folder, words):
    """Parameters of this rank after a load, and logits where there is one rank: ({name: (sharding, array)}, array)."""
    from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.state import model_tensors
    from mindspeed_ms.core.tensor_parallel.cell import global_name

    all_config = config_of(folder, *words)
    config = all_config.model_config
    builders.start(config)
    model = builders.make_model(config)
    model.set_train(False)
    with open_checkpoint(folder, all_config) as reader:
        load_tensors(reader, list(model_tensors([model])), vocab_size=config.vocab_size)
    parameters = {global_name(name, one): (one.sharding, one.asnumpy().copy()) for name, one in model.parameters_and_names()}
    if words:
        return parameters, None
    inputs = builders.batch(config, batch_size=2, length=32)
    return parameters, model(inputs["tokens"], inputs["position_ids"]).asnumpy()


@pytest.mark.parametrize("parts", [parts for parts in PARTS if parts != "one"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2_windows"])
def test_each_rank_reads_its_slices(world, tmp_path, name, parts):
    folder, _ = write_folder(tmp_path / "model", CONFIGS[name], files=2)
    results = world(2)(load, folder, PARTS[parts])
    whole = builders.joined(results, 0)
    from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader

    with CheckpointReader(folder, read_manifest(folder)) as reader:
        assert set(whole) == set(reader.manifest.tensors)
        for key, array in whole.items():
            np.testing.assert_array_equal(array, reader.read_whole(key), err_msg=key)


def test_the_model_is_that_of_config_json(tmp_path):
    folder, _ = write_folder(tmp_path / "model", CONFIGS["llama3"])
    model = config_of(folder).model_config
    assert (model.num_layers, model.kv_channels, model.num_query_groups, model.ffn_hidden_size) == (4, 16, 2, 48)
    assert model.rope_scaling.factor == 8 and not model.qkv_has_bias and not model.untie_embeddings_and_output_weights
    assert model.vocab_size == 64
    # ids of a tokenizer keep the padding of the model's embedding; other padding is a choice
    assert config_of(folder, "--vocab-size", "60").model_config.vocab_size == 64
    assert config_of(folder, "--vocab-size", "60", "--make-vocab-size-divisible-by", "48").model_config.vocab_size == 96
    odd, _ = write_folder(tmp_path / "odd", {**CONFIGS["llama3"], "vocab_size": 63})
    assert (
        config_of(odd, "--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "1").model_config.vocab_size == 64
    )


def start_from(folder, words):
    """Starting point of a run with `--load folder`."""
    from mindspeed_ms.training.checkpoint_manager import find_starting_point

    start = find_starting_point(config_of(folder, *words))
    return start.path, start.resumes


def test_weights_alone_are_the_beginning_of_a_training(world, tmp_path):
    folder, _ = write_folder(tmp_path / "model", CONFIGS["qwen2"])
    assert world(1)(start_from, folder, ("--save", str(tmp_path / "out"))) == [(folder, False)]
