"""Rewards of PPO and GRPO: reward functions, reward models, prompts, and what is wrong with them."""

import json
import os

import numpy as np
import pytest

from tests.posttrain import generating, runs
from tests.preprocess.toy_tokenizer import write_tokenizer

REWARD_ERRORS = {
    "raises": r"rewards\.py:raises failed at an answer to record 1 of .*prompts: KeyError: 'three'",
    "nan": r"rewards\.py:nan gave nan for an answer to record \d of .*prompts: expected a finite float32 number",
    "short": r"rewards\.py:short gave 1 rewards of 8 answers",
    "odd": r"has the parameter texts: expected some of prompts, answers",
    "conut": r"has no function conut; it has count, dense, raises, nan, short, odd",
    "huge": r"rewards\.py:huge gave 1e\+39 for an answer to record \d of .*expected a finite float32 number",
    "endless": r"rewards\.py:endless gave 1000000.* for an answer to record \d of .*expected a finite float32 number",
    "leaves": r"rewards\.py:leaves failed at an answer to record \d of .*: SystemExit: 0",
    "lazy": r"rewards\.py:lazy failed at an answer to record \d of .*: ZeroDivisionError: division by zero",
    "named": r"rewards\.py:named gave \{0: 1\.0, .*: expected a list with a number for each answer",
    "builtin": r"rewards\.py:builtin does not say its parameters",
}


@pytest.mark.parametrize("name", REWARD_ERRORS)
def test_wrong_reward_functions(world, tmp_path, prompts, name):
    with pytest.raises(Exception, match=REWARD_ERRORS[name]) as error:
        world(1)(generating.train, "grpo", str(tmp_path), prompts, reward=name)
    assert "\n" not in str(error.value)


def test_files_of_reward_functions(tmp_path):
    """They may import what lies beside them and define dataclasses; one that ends the program is an error."""
    from mindspeed_ms.tasks.posttrain.rewards import RewardError, load_reward_function

    (tmp_path / "beside_rewards.py").write_text("VALUE = 3\n", encoding="utf-8")
    (tmp_path / "tabnanny.py").write_text("raise KeyError\n", encoding="utf-8")  # hides no module of Python
    (tmp_path / "good.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside_rewards, tabnanny\n"
        "@dataclass\nclass Reward:\n    value: int\n"
        "def reward(answers):\n    return [Reward(beside_rewards.VALUE).value for _ in answers]\n",
        encoding="utf-8",
    )
    assert load_reward_function(f"{tmp_path}/good.py:reward", "x")(["record 0"], answers=["a"]) == [3.0]
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    with pytest.raises(RewardError, match=r"leaves\.py cannot be imported: SystemExit: 0"):
        load_reward_function(f"{tmp_path}/leaves.py:reward", "x")


@pytest.mark.parametrize(
    "name, text",
    [
        (":reward", "expected FILE.py:NAME"),
        ("{}/some.py:1", "expected FILE.py:NAME"),
        ("{}:reward", "there is no file {}."),
        ("{}/some.txt:reward", "some.txt is no Python file"),
        ("{}/some.py:VALUE", "some.py has no function VALUE; it has reward."),
        ("{}/empty.py:reward", "empty.py has no function reward; it has none."),
        ("{}/fails.py:reward", "fails.py cannot be imported: ValueError: one two."),
    ],
)
def test_names_of_no_reward_function(tmp_path, name, text):
    from mindspeed_ms.tasks.posttrain.rewards import RewardError, load_reward_function

    some = "VALUE = 3\ndef _own():\n    pass\ndef reward(answers):\n    return answers\n"
    files = {"some.py": some, "some.txt": some, "empty.py": "", "fails.py": "raise ValueError('one\\n two')\n"}
    for file, written in files.items():
        (tmp_path / file).write_text(written, encoding="utf-8")
    with pytest.raises(RewardError) as error:
        load_reward_function(name.format(tmp_path), "x")
    assert str(error.value).startswith(f"x is {name.format(tmp_path)}: ") and text.format(tmp_path) in str(error.value)


SETTINGS_ERRORS = [
    ({"training": {"reward_function": None}}, "reward_function.* is not given: name the function"),
    ({"training": {"reward_function": "nowhere.py:f"}}, r"there is no file nowhere\.py"),
    ({"training": {"num_generations": 3}}, "num_generations.*expected a divisor of the global batch size 8"),
    ({"training": {"num_generations": 1}}, "num_generations.*expected at least 2"),
    ({"training": {"rollout_batch_size": 12}}, "rollout_batch_size.*expected a multiple of the global batch size 8"),
    ({"training": {"max_new_tokens": 14}}, r"prompt 1 of .* has 3 tokens, and max_new_tokens .* is 14, at seq_length 16"),
    ({"training": {"epochs": 1, "training_iters": 0}}, "epochs.*give training_iters"),
    ({"parallel": {"context_parallel_size": 2}}, "context_parallel_size.*cuts no sequences"),
    ({"model": {"vocab_size": 8}}, "has the id 8, but the model's vocabulary has 8 ids"),
]


@pytest.mark.parametrize("settings, text", SETTINGS_ERRORS, ids=[text[:24] for _, text in SETTINGS_ERRORS])
def test_settings_that_do_not_fit(world, tmp_path, prompts, settings, text):
    with pytest.raises(Exception, match=text):
        world(1)(generating.train, "grpo", str(tmp_path), prompts, **settings)


def test_conversations_are_no_prompts(world, tmp_path, files):
    generating.write_prompts(str(tmp_path))
    reward = {"reward_function": f"{tmp_path}/rewards.py:count"}
    with pytest.raises(Exception, match="holds conversations with answers, and stage grpo generates them"):
        world(1)(generating.train, "grpo", str(tmp_path / "run"), files["chats"], training=reward)


def test_prompts_are_no_conversations(world, tmp_path, prompts):
    with pytest.raises(Exception, match="There are prompts by that name, which --stage trl_ppo or grpo trains on"):
        world(1)(runs.train, "sft", str(tmp_path), prompts)


def of_texts(folder):
    """Settings of a training on raw records, with a tokenizer."""
    os.makedirs(folder / "tokenizer", exist_ok=True)
    tokenizer = {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": write_tokenizer(folder / "tokenizer"),
        "prompt_type": "qwen",
    }
    return {"dataset": tokenizer, "model": {"vocab_size": 1024, "seq_length": 128}}


def test_raw_records_reach_the_reward_function(world, tmp_path):
    """Texts, ids and the record of each prompt; in the order of the answers."""
    records = [{"instruction": f"Say {word}.", "output": "", "truth": word} for word in ("one", "two", "three")]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    (tmp_path / "rewards.py").write_text(
        "import json\n"
        "def tell(prompts, answers, prompt_ids, answer_ids, records):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
        "        for row in zip(prompts, answers, prompt_ids, answer_ids, records):\n"
        "            file.write(json.dumps(row) + '\\n')\n"
        "    return [len(ids) for ids in answer_ids]\n"
        "def fails(records):\n"
        "    return [1 / (record['truth'] != 'two') for record in records]\n",
        encoding="utf-8",
    )
    settings = {**of_texts(tmp_path), "parallel": generating.LAYOUTS["tp2"]}  # all ranks read what rank 0 prepared
    world(2)(generating.train, "grpo", str(tmp_path / "run"), str(data), "tell", **settings)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(seen) == 24 and {row[4]["truth"] for row in seen} == {"one", "two", "three"}
    for prompt, answer, prompt_ids, answer_ids, record in seen:
        assert record["instruction"] in prompt and isinstance(answer, str) and prompt_ids and answer_ids
    assert [row[4]["truth"] for row in seen[:4]] == [seen[0][4]["truth"]] * 4
    with pytest.raises(Exception, match=r"failed at an answer to .*/prompts_\w+_records\.jsonl, line 2: ZeroDivisionError"):
        world(1)(generating.train, "grpo", str(tmp_path / "run"), str(data), "fails", **of_texts(tmp_path))


def test_records_without_a_prompt_are_named(world, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"instruction": "Say it.", "output": ""}\n{"instruction": "", "output": ""}\n', encoding="utf-8")
    generating.write_prompts(str(tmp_path))
    for _ in range(2):
        with pytest.raises(Exception, match=r"not every record has a prompt: .*no question") as error:
            world(1)(generating.train, "grpo", str(tmp_path / "run"), str(data), **of_texts(tmp_path))
        assert f"{data}, line 2" in str(error.value)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_rewards_of_a_model(world, tmp_path, prompts, reward_model, layout):
    """The value at the last token of prompt and answer, by a forward of the whole model on one rank."""
    training = {"reward_function": None, "reward_model": reward_model}
    ranks = world(2)(generating.train, "grpo", str(tmp_path), prompts, training=training, parallel=generating.LAYOUTS[layout])
    rollout = ranks[0]["rollout"]
    ends = [int(np.flatnonzero(mask)[-1]) + 1 for mask in rollout["loss_mask"]]
    (values,) = world(1)(values_of, reward_model, rollout["tokens"])
    np.testing.assert_allclose(rollout["rewards"], values[np.arange(len(ends)), ends], atol=1e-5)
    assert np.ptp(rollout["rewards"]) > 1e-4


def scored(folder, tokens, mask, parallel):
    """Scores of a reward model `[n]`."""
    from mindspeed_ms.tasks.posttrain.reward_model import RewardModel, check_reward_model
    from mindspeed_ms.testing.parity.runner import start

    runs.reset()
    training = {"num_generations": 4, "reward_model": folder}
    config = runs.configuration("grpo", folder, "data", parallel, model=generating.SMALL, training=training)
    start(config, 7)
    return RewardModel(config, check_reward_model(config)).scores({"tokens": tokens, "loss_mask": mask}, None)


@pytest.mark.parametrize("lora, vocabulary, tp", [(generating.LORA, 32, 1), ({}, 33, 2)], ids=["adapters", "odd vocabulary"])
def test_rewards_of_models_of_other_shapes(world, tmp_path, lora, vocabulary, tp):
    """Adapters are merged into the weights; a vocabulary that the ranks cannot share is padded."""
    data, folder = runs.write_pairs(str(tmp_path / "small"), vocabulary=32), str(tmp_path / "rewards")
    settings = {"model": {**generating.SMALL, "vocab_size": vocabulary}, "lora": lora}
    training = {"save_enabled": True, "training_iters": 2}
    world(1)(runs.train, "orm", folder, data, **settings, training=training, optimizer={"learning_rate": 0.1})
    tokens, mask = np.arange(64, dtype=np.int32).reshape(4, 16) % 32, np.eye(16, dtype=np.float32)[[14] * 4]
    (values,) = world(1)(values_of, folder, tokens, **settings)
    for found in world(tp)(scored, folder, tokens, mask, {"tensor_model_parallel_size": tp}):
        np.testing.assert_allclose(found, values[:, -1], atol=1e-5)


def values_of(folder, tokens, model=generating.SMALL, **settings):
    """Values `[n, s]` of a reward model, sequence by sequence."""
    from mindspore import Tensor

    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.testing.parity.runner import start
    from mindspeed_ms.training.checkpointing import load_checkpoint
    from mindspeed_ms.training.model_setup import get_model

    runs.reset()
    config = runs.configuration("orm", folder, "data", model=model, **settings)
    start(config, 7)
    model = get_model(lambda pre_process, post_process: GPTModel(config.model_config), config)[0]
    with open_checkpoint(find_checkpoint(folder), config) as reader:
        load_checkpoint(reader, [model])
    model.set_train(False)
    return np.concatenate([model(Tensor(row[None]), None, None).asnumpy() for row in tokens])


def test_wrong_reward_models(world, tmp_path, prompts, reward_model, policy):
    def error(model=None, **training):
        with pytest.raises(Exception) as found:
            world(1)(generating.train, "grpo", str(tmp_path / "run"), prompts, training=training, model=model or {})
        return str(found.value)

    assert "holds no reward model: train one with --stage orm" in error(reward_function=None, reward_model=policy)
    assert "nowhere" in error(reward_function=None, reward_model=str(tmp_path / "nowhere"))
    assert "both give the rewards; keep one" in error(reward_model=reward_model)
    larger = error({"vocab_size": 64}, reward_function=None, reward_model=reward_model)
    assert "whose vocabulary has 32 ids, and the policy's 64: expected the same" in larger
