"""Process rewards: the loss of a numpy account with and without reward tokens, in every layout."""

import json
import os

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings
from tests.posttrain import runs

LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
}


def write_tokenizer(folder):
    """A Hugging Face folder whose ids are those of `runs.write_steps`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    os.makedirs(folder, exist_ok=True)
    names = {runs.PLACEHOLDER: "ки", runs.GOOD: "+", runs.BAD: "-"}
    vocab = {names.get(number, f"w{number}"): number for number in range(runs.VOCABULARY - 1)}
    vocab["<eos>"] = runs.VOCABULARY - 1
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}, file)
    return str(folder)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Settings with two reward tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": folder,
        "reward_tokens": ["+", "-"],
        "eos_token_id": runs.VOCABULARY - 1,
    }


@pytest.fixture(scope="module")
def one(world, tmp_path_factory, files, dataset):
    return world(1)(runs.train, "prm", str(tmp_path_factory.mktemp("one")), files["steps"], dataset=dataset)[0]


@pytest.mark.parametrize("restricted", [True, False])
def test_the_loss_is_that_of_the_account(world, tmp_path, files, dataset, one, restricted):
    found = one
    if not restricted:
        (found,) = world(1)(runs.train, "prm", str(tmp_path / "run"), files["steps"], training={"training_iters": 1})
    logits, batch = world(1)(runs.logits_of, str(tmp_path), files["steps"], found["order"][:4], stage="prm")[0]
    labels, mask = batch["labels"], batch["loss_mask"]
    if restricted:
        ids = [runs.GOOD, runs.BAD]
        logits, labels = logits[..., ids], (batch["labels"] == runs.BAD).astype(np.int64)
    losses = -runs.log_probabilities(logits, labels) * mask
    line = found["lines"][0]
    assert line["loss"] == pytest.approx(losses.sum() / mask.sum(), rel=1e-6)
    assert line["accuracy"] == pytest.approx(((logits.argmax(-1) == labels) * mask).sum() / mask.sum(), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_one_curve(world, tmp_path, files, dataset, one, layout):
    results = world(2)(runs.train, "prm", str(tmp_path), files["steps"], parallel=LAYOUTS[layout], dataset=dataset)
    small_trainings.assert_equal_trainings(
        [runs.with_curves(result) for result in results], [runs.with_curves(one)], False, tolerance=1e-5
    )
    np.testing.assert_allclose(runs.curve(results[0], "accuracy"), runs.curve(one, "accuracy"), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
def test_accumulation_does_not_change_the_gradient(world, tmp_path, files, dataset, one, rows):
    (split,) = world(1)(runs.train, "prm", str(tmp_path), files["steps"], dataset={**dataset, "batch_size": rows})
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs.curve(split, name), runs.curve(one, name), rtol=1e-5)
