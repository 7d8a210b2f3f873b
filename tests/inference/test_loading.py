"""Loading for inference: tokenizer, ends, dtype and length of a folder; refusals in one line, before anything is built."""

import json
from unittest.mock import patch

import numpy as np
import pytest

from mindspeed_ms.inference import checkpoint
from mindspeed_ms.inference.checkpoint import read_checkpoint
from tests.conversion.test_hugging_face import convert
from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.preprocess.toy_tokenizer import write_tokenizer

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def loaded(folder, **arguments):
    """What `load` found, and the logits after IDS; the runner's numbers."""
    from mindspeed_ms.core import parallel_state, rng
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.model_runner import Feed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with patch.object(rng, "initial_values", side_effect=AssertionError("values are drawn that nothing needs")):
        found = load(folder, **arguments)
    runner = found.runner
    (logits,) = runner.forward([Feed(0, 0, IDS)])
    return {
        "vocab_size": runner.vocab_size,
        "length": runner.max_sequence_length,
        "bytes": runner.cache.bytes,
        "eos": found.eos_ids,
        "template": found.chat_template,
        "tokenizer": None if found.tokenizer is None else found.tokenizer.vocab_size,
        "dtype": found.config.model_config.compute_dtype,
        "logits": logits,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "hf"
    write_folder(path, {**CONFIGS["llama"], "eos_token_id": 7})
    return path


def test_a_folder_in_every_layout(world, folder):
    (one,) = world(1)(loaded, folder)
    expected = {"vocab_size": 64, "length": 64, "eos": (7,), "template": None, "tokenizer": None, "dtype": "float32"}
    assert {name: one[name] for name in expected} == expected
    assert one["bytes"] == 2 * 4 * 2 * 8 * 64 * 8 * 4
    interleaved = {"pipeline_model_parallel_size": 2, "flags": ("--num-layers-per-virtual-pipeline-stage", "1")}
    for layout in ({"tensor_model_parallel_size": 2}, interleaved):
        for rank in world(2)(loaded, folder, **layout):
            assert np.abs(rank["logits"] - one["logits"]).max() < 1e-5 * np.abs(one["logits"]).max()
    (half,) = world(1)(loaded, folder, dtype="bf16", max_sequence_length=100, slots=2)
    assert (half["dtype"], half["length"], half["bytes"]) == ("bfloat16", 100, 2 * 4 * 2 * 8 * 100 * 2 * 2)
    assert np.abs(half["logits"] - one["logits"]).max() < 0.06 * np.abs(one["logits"]).max()


def test_a_vocabulary_that_ranks_cannot_share_is_padded(world, tmp_path):
    """Of weights with and without a number of ids; padding is no token."""
    write_folder(tmp_path / "hf", {**CONFIGS["llama"], "vocab_size": 65})
    convert(tmp_path / "hf", tmp_path / "native", "--save-model-type", "native", "--make-vocab-size-divisible-by", "1")
    (one,) = world(1)(loaded, tmp_path / "hf")
    assert one["logits"].shape == (65,)
    for name in ("hf", "native"):
        for rank in world(2)(loaded, tmp_path / name, tensor_model_parallel_size=2):
            assert rank["vocab_size"] == 65
            np.testing.assert_allclose(rank["logits"], one["logits"], atol=1e-5 * np.abs(one["logits"]).max())


def test_tokenizer_and_ends_are_beside_the_weights(world, tmp_path):
    (tmp_path / "hf").mkdir()
    write_tokenizer(tmp_path / "hf", chat_template="{{ messages }}")
    write_folder(tmp_path / "hf", {**CONFIGS["gpt2"], "vocab_size": 4096, "eos_token_id": 7})
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (found,) = world(1)(loaded, tmp_path / "hf")
    assert (found["eos"], found["template"], found["vocab_size"]) == ((2, 5), "{{ messages }}", 4096)
    assert found["tokenizer"] is not None


def test_what_is_known_before_a_model_is_built(folder, tmp_path):
    """The context is 8192 at most unless it is asked for; padding of the vocabulary is no token; unused flags are named."""
    write_folder(tmp_path / "long", {**CONFIGS["llama"], "max_position_embeddings": 20000})
    assert read_checkpoint(tmp_path / "long").max_sequence_length == 8192
    assert read_checkpoint(tmp_path / "long", max_sequence_length=9000).max_sequence_length == 9000
    convert(folder, tmp_path / "padded", "--save-model-type", "native", "--make-vocab-size-divisible-by", "48")
    found = read_checkpoint(tmp_path / "padded", expert_tensor_parallel_size=1)
    assert (found.vocab_size, found.config.model_config.vocab_size, found.ranks, found.warnings) == (64, 96, 1, [])
    found = read_checkpoint(folder, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, max_sequence_length=100)
    assert found.ranks == 4 and found.warnings == []
    write_folder(tmp_path / "odd", {**CONFIGS["llama"], "vocab_size": 65})
    place, manifest = checkpoint.find_checkpoint(tmp_path / "odd", None)
    manifest.vocab_size = None  # as Megatron's, which may not say it
    with patch.object(checkpoint, "find_checkpoint", lambda *_: (place, manifest)):
        assert read_checkpoint(place, tensor_model_parallel_size=2).vocab_size == 65


UNUSED = ("--num-layers", "7", "--num-attention-heads", "4", "--save", "x", "--batch-size", "4", "--lr-warmup-iters", "9")


def test_flags_that_are_not_used_are_named(world, folder):
    (found,) = world(1)(warnings, folder, flags=(*UNUSED, "--sequence-parallel"), max_sequence_length=100)
    layers, others = found
    assert layers.startswith("--num-layers = 7 (command line) is not used: the checkpoint has 4")
    assert others == "without effect on inference: --save, --batch-size, --lr-warmup-iters, --sequence-parallel"


def warnings(folder, **arguments):
    """Texts of the warnings of `load`."""
    from mindspeed_ms.inference import loading

    with patch.object(loading.logger, "warning") as warning:
        loaded(folder, **arguments)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


@pytest.mark.parametrize("layout", [(), ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")])
def test_a_megatron_folder(world, folder, tmp_path, layout):
    """What Megatron's program reads gives the same logits, end tokens and rows, from the run or from its one checkpoint."""
    (one,) = world(1)(loaded, folder)
    convert(folder, tmp_path / "mg", "--save-model-type", "mg", *layout)
    (checkpoint,) = [path for path in (tmp_path / "mg").iterdir() if path.name.startswith(("iter_", "release"))]
    for place in (tmp_path / "mg", checkpoint):
        (found,) = world(1)(loaded, str(place))
        assert {**found, "logits": None} == {**one, "logits": None}
        np.testing.assert_allclose(found["logits"], one["logits"], atol=1e-6)


def refusals(folder, learned, cases):
    """{name: message} of arguments that `load` refuses; asserts that no grid was laid before."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.inference.loading import load

    messages = {}
    for name, (path, arguments) in cases.items():
        with pytest.raises((ValueError, CheckpointError)) as caught:
            load({"folder": folder, "learned": learned}.get(path, path), **arguments)
        messages[name] = str(caught.value)
        assert not parallel_state.model_parallel_is_initialized(), name
    return messages


def test_what_cannot_be_loaded_is_said_in_one_line(world, folder, tmp_path):
    write_folder(tmp_path / "learned", CONFIGS["gpt2"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    expected = {
        "missing": ((f"{tmp_path}/nothing", {}), "nothing holds no checkpoint: it does not exist"),
        "empty": ((f"{tmp_path}/empty", {}), "empty holds no checkpoint: there is nothing in it."),
        "gguf": ((f"{tmp_path}/model.gguf", {}), "convert_ckpt.py --load-dir"),
        "heads": (("folder", {"tensor_model_parallel_size": 3}), "tensor-model-parallel-size"),
        "layers": (("folder", {"pipeline_model_parallel_size": 8}), "pipeline-model-parallel-size"),
        "zero": (("folder", {"tensor_model_parallel_size": 0}), "tensor_model_parallel_size is 0: expected an integer > 0"),
        "world": (("folder", {"tensor_model_parallel_size": 2}), "1 ranks were started"),
        "context": (
            ("folder", {"flags": ["--context-parallel-size", "2"]}),
            "--context-parallel-size is 2: inference cuts no sequence over ranks",
        ),
        "dtype": (("folder", {"dtype": "int8"}), "dtype is 'int8': expected one of float32, bfloat16, float16"),
        "length": (("learned", {"max_sequence_length": 65}), "max_sequence_length is 65: the model has a table of 64"),
        "memory": (("folder", {"slots": 10**9}), "max_sequence_length 64 with slots 1000000000 needs a cache of 32,768.0 GB"),
        "experts": (("folder", {"expert_model_parallel_size": None}), "expert_model_parallel_size is None: expected an"),
        "slots": (("folder", {"slots": 0}), "slots is 0: expected an integer > 0"),
        "chunk": (("folder", {"prefill_chunk": "x"}), "prefill_chunk is 'x'"),
        "iteration": (("folder", {"iteration": 7}), "is one checkpoint, not a run with several: leave the iteration (7) out"),
    }
    (messages,) = world(1)(refusals, folder, tmp_path / "learned", {name: case for name, (case, _) in expected.items()})
    for name, (_, words) in expected.items():
        assert words in messages[name] and "\n" not in messages[name], (name, messages[name])
