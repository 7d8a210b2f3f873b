"""What is wrong is said before the model is built, in one line."""

import os
import time
from unittest import mock

import pytest

from tests.posttrain import generating, runs
from tests.preprocess.toy_tokenizer import write_tokenizer

PAIR = {"chosen_input_ids": [1, 2, 3, 4], "rejected_input_ids": [1, 2, 5, 6]}
LABELS = {"chosen_labels": [-100, -100, 3, 4], "rejected_labels": [-100, -100, 5, 6]}


def write(folder, **changes):
    """A good pair, and a second one with some fields changed."""
    good = {**PAIR, **LABELS}
    return runs._write(os.path.join(folder, "pairs"), {name: [ids, {**good, **changes}[name]] for name, ids in good.items()})


def refused(world, folder, data, stage="dpo", **settings):
    """Text of the error; nothing may have been built."""
    with pytest.raises(Exception) as error:
        world(1)(runs.train_without_model, stage, str(folder), data, **settings)
    assert "a model was built" not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("stage", ["dpo", "simpo", "orm"])
def test_pairs(world, tmp_path, weights, stage):
    training = {"training": {"load_checkpoint": weights["base"]}}
    same = {"rejected_input_ids": PAIR["chosen_input_ids"], "rejected_labels": LABELS["chosen_labels"]}
    text = refused(world, tmp_path, write(tmp_path / "a", **same), stage, **training)
    assert text.startswith(f"pair 1 of {tmp_path}/a/pairs has equal answers")
    text = refused(world, tmp_path, write(tmp_path / "b", rejected_labels=[-100] * 4), stage, **training)
    assert "pair 1 of" in text and "has an empty rejected answer: mend the record" in text
    ids = list(range(1, 20))
    longer = {"chosen_input_ids": ids, "chosen_labels": [-100] + ids[1:]}
    text = refused(world, tmp_path, write(tmp_path / "c", **longer), stage, **training)
    assert "the chosen answer has 18 tokens" in text and "at seq_length 16: raise it (--seq-length)" in text


def test_reference_is_missing(world, tmp_path, files):
    text = refused(world, tmp_path, files["pairs"])
    assert text.startswith("stage dpo needs the weights of a reference model: start from a checkpoint (--load or")
    text = refused(world, tmp_path, files["pairs"], training={"ref_model": str(tmp_path / "nowhere")})
    assert text == f"training_config.ref_model is {tmp_path}/nowhere: there is no such folder."


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_reference_of_another_model(world, tmp_path, files, weights, stage):
    """Before anything is built."""
    data = generating.write_prompts(str(tmp_path))
    training = {"load_checkpoint": weights["base"], "reward_function": f"{tmp_path}/rewards.py:count", "num_generations": 2}
    settings = {"training": {**training, "ref_model": weights["moe"]}}
    text = refused(world, tmp_path / "run", files["pairs"] if stage == "dpo" else data, stage, **settings)
    assert text.startswith(f"training_config.ref_model is {weights['moe']}: ") and "holds another model" in text
    settings["training"]["ref_model"] = str(tmp_path)
    text = refused(world, tmp_path / "run", files["pairs"] if stage == "dpo" else data, stage, **settings)
    assert text.startswith(f"training_config.ref_model is {tmp_path}: ") and "holds no checkpoint" in text


def test_folder_that_cannot_be_made(world, tmp_path, files):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"instruction": "a", "output": "b"}\n', encoding="utf-8")
    (tmp_path / "tokenizer").mkdir()
    dataset = {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": write_tokenizer(tmp_path / "tokenizer")}
    settings = {"dataset": {**dataset, "prompt_type": "qwen"}, "model": {"vocab_size": 1024}}
    text = refused(world, tmp_path / "file", str(chats), "sft", **settings)
    assert text == f"training_config.output_dir: data cannot be prepared in {tmp_path}/file/data (Not a directory)."


def test_data_of_another_stage(world, tmp_path, files, weights):
    training = {"training": {"load_checkpoint": weights["base"]}}
    assert "There are conversations (or step rewards) by that name, which --stage sft (prm) trains on" in refused(
        world, tmp_path, files["chats"], "dpo", **training
    )
    assert "There are pairs of answers by that name, which --stage dpo, simpo or orm trains on" in refused(
        world, tmp_path, files["pairs"], "sft"
    )
    assert "holds step rewards, whose labels stand at placeholders: train them with --stage prm" in refused(
        world, tmp_path, files["steps"], "sft"
    )
    assert "holds no step rewards" in refused(world, tmp_path, files["chats"], "prm")


def test_training_of_another_stage_is_not_continued(world, tmp_path, files, weights):
    resumes = {"training": {"load_checkpoint": weights["base"], "resume_training": True}}
    text = refused(world, tmp_path, files["pairs"], "dpo", **resumes)
    assert "holds a training of stage sft, and this one is of stage dpo" in text and "--pretrained-checkpoint" in text


def test_stages_that_do_not_exist(world, tmp_path):
    from mindspeed_ms.tasks.posttrain.stages import StageError, trainer_class

    with pytest.raises(
        StageError, match=r"'dop': expected one of sft, dpo, simpo, orm, prm, trl_ppo, grpo\. Did you mean 'dpo'"
    ):
        trainer_class("dop")
    with pytest.raises(StageError, match="is not given: expected one of"):
        trainer_class(None)


def test_trainer_of_another_stage(world, tmp_path, files):
    with pytest.raises(Exception, match=r"stage \(--stage\) is 'prm': SFTTrainer trains stage sft"):
        world(1)(runs.train, "prm", str(tmp_path), files["steps"], trainer=runs.sft_trainer)


def test_adapters_of_another_base(world, tmp_path, files, weights):
    lora = {"use_lora": True, "lora_rank": 2, "target_cells": [{"target_cells": [r".*\.mapping"]}]}
    training = {"load_checkpoint": weights["base"], "save_enabled": True, "training_iters": 1}
    world(1)(runs.train, "sft", str(tmp_path / "adapters"), files["chats"], training=training, lora=lora)
    wide = {"model": {"hidden_size": 64}, "lora": {**lora, "lora_load": str(tmp_path / "adapters")}}
    text = refused(world, tmp_path / "run", files["chats"], "sft", **wide)
    assert "adapters of another base" in text and "hidden_size" in text


def waited(folder, data, work):
    """Error of each rank, where rank 0 takes longer alone than the ranks wait."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.tasks.posttrain import datasets
    from mindspeed_ms.tasks.posttrain.rewards import RewardFunction
    from mindspeed_ms.tasks.posttrain.rollout import Rollouts

    comm.world_group().timeout = 0.3
    slow = mock.Mock(side_effect=lambda *_: time.sleep(0.8))
    with mock.patch.object(datasets, "prepare_raw_data", slow), mock.patch.object(Rollouts, "_call", slow):
        try:
            if work == "data":
                datasets.StageDatasets(runs.configuration("sft", folder, data)).prepare()
            else:
                rollouts = object.__new__(Rollouts)
                rollouts.reward = RewardFunction(lambda answers: answers, "rewards.py:slow")
                rollouts._by_function([], [])
        except (comm.CommError, TypeError) as error:
            return str(error)


@pytest.mark.parametrize(
    "work, words", [("data", "prepares and checks the data"), ("rewards", "calls the reward function rewards.py:slow")]
)
def test_what_the_other_ranks_wait_for_is_named(world, tmp_path, files, work, words):
    text = world(2)(waited, str(tmp_path), files["chats"], work)[1]
    assert f"The call waits for rank 0, which {words}. To wait longer raise --distributed-timeout-minutes (" in text
