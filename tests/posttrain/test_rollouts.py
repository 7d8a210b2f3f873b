"""PPO and GRPO: a toy reward rises; equal numbers in every layout and after a resume; what the reference is; errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.posttrain import generating, runs
from tests.posttrain.options import ROLLOUT_OPTIONS
from tests.preprocess.toy_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
LORA = {"use_lora": True, "lora_rank": 2, "target_cells": [{"target_cells": [r".*\.mapping"]}]}
SEVERAL = {"rollout_batch_size": 16, "ppo_epochs": 2, "training_iters": 6}  # steps of a rollout: 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return generating.write_prompts(str(tmp_path_factory.mktemp("prompts")))


RISE = {"grpo": {"grpo_beta": 0.01}, "trl_ppo": {"kl_coef": 0.01, "num_generations": 1}}
STAGES = list(RISE)


@pytest.mark.parametrize("stage", STAGES)
def test_reward_rises(world, tmp_path, prompts, stage):
    """The count of one token among the six of an answer."""
    training = {"training_iters": 50, **RISE[stage]}
    (result,) = world(1)(generating.train, stage, str(tmp_path), prompts, training=training, optimizer={"learning_rate": 0.005})
    rewards = runs.curve(result, "reward")
    assert np.mean(rewards[:5]) < 0.5 and np.mean(rewards[-10:]) > 4, rewards


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory, prompts):
    return {
        stage: world(1)(
            generating.train, stage, str(tmp_path_factory.mktemp(stage)), prompts, "dense", training=SEVERAL, scored=True
        )[0]
        for stage in STAGES
    }


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vpp2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "dp2": {},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_layouts_are_equal(world, tmp_path, prompts, plain, stage, layout):
    """Answers, log-probabilities, values and losses, in two epochs of two steps; in another split into micro-batches."""
    ranks = world(2)(
        generating.train,
        stage,
        str(tmp_path),
        prompts,
        "dense",
        training=SEVERAL,
        dataset={"batch_size": 2},
        parallel=LAYOUTS[layout],
    )
    expected = plain[stage]
    assert set(ranks[0]["rollout"]) == set(expected["rollout"])
    for name, values in expected["rollout"].items():
        np.testing.assert_allclose(ranks[0]["rollout"][name], values, atol=1e-4 if name == "advantages" else 1e-5, err_msg=name)
        np.testing.assert_array_equal(ranks[0]["rollout"][name], ranks[1]["rollout"][name])
    for name in set(expected["lines"][0]) - {"time_ms", "tokens_per_second"}:
        np.testing.assert_allclose(runs.curve(ranks[0], name), runs.curve(expected, name), atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_old_log_probabilities_are_those_of_the_generation(plain, stage):
    """The cache of keys and the forward of the training are two ways to one number."""
    rollout, scores = plain[stage]["rollout"], plain[stage]["scores"]
    for row, own in enumerate(scores):
        np.testing.assert_allclose(rollout["old_log_probs"][row][rollout["loss_mask"][row] > 0], own, atol=1e-5)


def test_rewards_of_ppo_become_advantages(plain):
    """Backwards: the advantages tell the reward of each token, the divergence by the reference and at the end the answer's."""
    rollout = {name: values.astype(np.float64) for name, values in plain["trl_ppo"]["rollout"].items()}
    advantages = np.zeros_like(rollout["returns"])
    for row, mask in enumerate(rollout["loss_mask"]):
        places = np.flatnonzero(mask)
        values = rollout["old_values"][row, places]
        own = rollout["returns"][row, places] - values
        advantages[row, places] = own
        rewards = own - 0.95 * np.append(own[1:], 0) - np.append(values[1:], 0) + values
        rewards[-1] -= rollout["rewards"][row]
        ratios = -rewards / 0.3
        np.testing.assert_allclose(np.expm1(-ratios) + ratios, rollout["kl"][row, places], atol=2e-5)
    assert rollout["kl"].max() > 1e-3
    counted = advantages[rollout["loss_mask"] > 0]
    whitened = (advantages - counted.mean()) / counted.std() * rollout["loss_mask"]
    np.testing.assert_allclose(rollout["advantages"], whitened, atol=1e-5)


def test_experts_on_two_ranks(world, tmp_path, prompts):
    """Ranks that share experts generate everything together."""
    moe = {"num_experts": 4, "moe_router_topk": 2}
    found = [
        world(size)(
            generating.train,
            "grpo",
            str(tmp_path / str(size)),
            prompts,
            moe=moe,
            parallel={"expert_model_parallel_size": size},
            scored=True,
        )
        for size in (1, 2)
    ]
    np.testing.assert_array_equal(*(one[0]["rollout"]["tokens"] for one in found))
    np.testing.assert_allclose(*(runs.curve(one[0]) for one in found), atol=1e-5)
    assert [len(rank["scores"]) for rank in found[1]] == [8, 8]


def test_data_parallel_ranks_share_the_prompts(world, tmp_path, prompts):
    """Each generates for its own half, with the weights of now, though they are gathered late."""
    training = {"wrap_with_ddp": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "training_iters": 4}
    overlapped = {"optimizer": {"overlap_param_gather": True}, "training": training}
    settings = {"dataset": {"batch_size": 2}, "scored": True}
    plain = world(2)(
        generating.train, "grpo", str(tmp_path / "a"), prompts, "dense", training={"training_iters": 4}, **settings
    )
    late = world(2)(generating.train, "grpo", str(tmp_path / "b"), prompts, "dense", **overlapped, **settings)
    assert [len(rank["scores"]) for rank in late] == [4, 4]
    np.testing.assert_array_equal(late[0]["rollout"]["tokens"], plain[0]["rollout"]["tokens"])
    np.testing.assert_allclose(runs.curve(late[0]), runs.curve(plain[0]), atol=1e-6)


@pytest.mark.parametrize("settings", [{"training_iters": 4}, SEVERAL], ids=["one step", "middle of a rollout"])
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_bit_equal(world, tmp_path, prompts, stage, settings):
    base = {**settings, "save_enabled": True, "resume_training": True}
    (whole,) = world(1)(generating.train, stage, str(tmp_path / "whole"), prompts, "dense", training=base)
    folder = str(tmp_path / "half")
    world(1)(generating.train, stage, folder, prompts, "dense", training={**base, "exit_interval": 2})
    (second,) = world(1)(generating.train, stage, folder, prompts, "dense", training=base)
    for name in set(whole["lines"][0]) - {"time_ms", "tokens_per_second"}:
        assert runs.curve(second, name) == runs.curve(whole, name), name
    for name, (_, values) in whole["weights"].items():
        np.testing.assert_array_equal(second["weights"][name][1], values, err_msg=name)


def test_base_is_the_reference_of_adapters(world, tmp_path, prompts):
    (result,) = world(1)(
        generating.train, "grpo", str(tmp_path), prompts, "dense", lora=LORA, optimizer={"learning_rate": 0.05}
    )
    kl = runs.curve(result, "kl")
    assert abs(kl[0]) < 1e-9 and kl[-1] > 1e-4


def test_reference_is_another_checkpoint(world, tmp_path, prompts):
    """Its divergence is there at the first step; the policy starts from its own weights all the same."""
    saved = {"training_iters": 1, "save_enabled": True, "seed": 5}
    world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, training=saved)
    results = [
        world(1)(generating.train, "grpo", str(tmp_path / name), prompts, training={"grpo_beta": 0.1, **training})[0]
        for name, training in (("own", {}), ("with", {"ref_model": str(tmp_path / "other")}))
    ]
    assert runs.curve(results[0], "kl")[0] == 0 and runs.curve(results[1], "kl")[0] > 0.01
    assert runs.curve(results[0], "reward")[0] == runs.curve(results[1], "reward")[0]
    assert results[0]["lines"][0]["response_length"] == results[1]["lines"][0]["response_length"]


def test_reference_of_another_run_is_refused(world, tmp_path, prompts):
    folder, base = str(tmp_path / "run"), {"training_iters": 4, "save_enabled": True, "resume_training": True}
    world(1)(generating.train, "grpo", folder, prompts, training={**base, "exit_interval": 2})
    world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, training={"training_iters": 1, "save_enabled": True})
    with pytest.raises(Exception, match="is of another reference model than"):
        world(1)(generating.train, "grpo", folder, prompts, training={**base, "ref_model": str(tmp_path / "other")})
    os.remove(os.path.join(folder, "reference.json"))
    with pytest.raises(Exception, match=r"no reference\.json beside .*name it with --ref-model"):
        world(1)(generating.train, "grpo", folder, prompts, training=base)


REWARD_ERRORS = {
    "raises": r"rewards\.py:raises failed at an answer to record 1 of .*prompts: KeyError: 'three'",
    "nan": r"rewards\.py:nan gave nan for an answer to record \d of .*prompts: expected a finite number",
    "short": r"rewards\.py:short gave 1 rewards of 8 answers",
    "odd": r"has the parameter texts: expected some of prompts, answers",
    "conut": r"has no function conut; it has count, dense, raises, nan, short, odd",
}


@pytest.mark.parametrize("name", REWARD_ERRORS)
def test_wrong_reward_functions(world, tmp_path, prompts, name):
    with pytest.raises(Exception, match=REWARD_ERRORS[name]) as error:
        world(1)(generating.train, "grpo", str(tmp_path), prompts, reward=name)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("path", [path for path in ROLLOUT_OPTIONS if not path.endswith("reward_model")])
def test_option_has_its_effect(world, tmp_path, prompts, path):
    stage, value, beside = ROLLOUT_OPTIONS[path]
    value = value.format(folder=os.path.dirname(prompts)) if isinstance(value, str) else value
    curves = []
    for name, own in (("plain", {}), ("changed", {path.partition(".")[2]: value})):
        training = {"training_iters": 3, **beside, **own}
        (result,) = world(1)(generating.train, stage, str(tmp_path / name), prompts, "dense", training=training)
        curves.append([runs.curve(result), runs.curve(result, "grad_norm"), runs.curve(result, "reward")])
    if path.endswith("reward_function"):
        (result,) = world(1)(generating.train, stage, str(tmp_path / "count"), prompts, "count")
        curves[0] = [runs.curve(result), runs.curve(result, "grad_norm"), runs.curve(result, "reward")]
    assert curves[0] != curves[1]


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
        "    return [len(ids) for ids in answer_ids]\n",
        encoding="utf-8",
    )
    (tmp_path / "tokenizer").mkdir()
    tokenizer = {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": write_tokenizer(tmp_path / "tokenizer"),
        "prompt_type": "qwen",
    }
    model = {"vocab_size": 1024, "seq_length": 128}
    world(1)(generating.train, "grpo", str(tmp_path / "run"), str(data), "tell", dataset=tokenizer, model=model)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(seen) == 24 and {row[4]["truth"] for row in seen} == {"one", "two", "three"}
    for prompt, answer, prompt_ids, answer_ids, record in seen:
        assert record["instruction"] in prompt and isinstance(answer, str) and prompt_ids and answer_ids
    assert [row[4]["truth"] for row in seen[:4]] == [seen[0][4]["truth"]] * 4


@pytest.fixture(scope="module")
def policy(world, tmp_path_factory, prompts):
    """Folder of a policy with a critic, trained for two steps."""
    folder = str(tmp_path_factory.mktemp("policy"))
    world(1)(generating.train, "trl_ppo", folder, prompts, training={"save_enabled": True, "training_iters": 2})
    return folder


def test_a_language_model_gets_a_critic(world, tmp_path, prompts, plain):
    """It is the reference too; the base of a resumed run is found again, and with its weights changed it is refused."""
    base = {"training_iters": 1, "save_enabled": True}
    world(1)(generating.train, "grpo", str(tmp_path / "base"), prompts, training=base)
    training = {"pretrained_checkpoint": str(tmp_path / "base"), "save_enabled": True, "resume_training": True}
    run = str(tmp_path / "run")
    (first,) = world(1)(generating.train, "trl_ppo", run, prompts, training={**training, "exit_interval": 2})
    assert abs(runs.curve(first, "kl")[0]) < 1e-9 and any(name.startswith("reward_head") for name in first["weights"])
    (second,) = world(1)(generating.train, "trl_ppo", run, prompts, training=training)
    assert len(second["lines"]) == 3
    weights = next((tmp_path / "base").glob("iter_*"))
    (weights / "another_file").write_text("x", encoding="utf-8")
    with pytest.raises(Exception, match="is of another reference model than"):
        world(1)(generating.train, "trl_ppo", run, prompts, training={**training, "training_iters": 5})


def test_a_policy_generates_and_is_trained_on_without_its_critic(world, tmp_path, prompts, policy):
    assert len(world(1)(continued, policy)[0]) == 4
    training = {"pretrained_checkpoint": policy}
    (result,) = world(1)(generating.train, "grpo", str(tmp_path), prompts, training=training)
    assert abs(runs.curve(result, "kl")[0]) < 1e-9 and not any(name.startswith("reward") for name in result["weights"])


def continued(folder):
    """Ids that the model of a folder continues with."""
    from mindspeed_ms.inference.engine import Engine
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.sampling import SamplingParams

    runs.reset()
    engine = Engine(load(folder, slots=1).runner)
    (answer,) = engine.generate([(1, 2)], SamplingParams(max_new_tokens=4, temperature=0))
    return answer.token_ids


@pytest.fixture(scope="module")
def reward_model(world, tmp_path_factory, files):
    """Folder of a reward model."""
    folder = str(tmp_path_factory.mktemp("rewards"))
    training = {"save_enabled": True, "training_iters": 2}
    data = runs.write_pairs(folder + "/small", vocabulary=32)
    world(1)(runs.train, "orm", folder, data, model=generating.SMALL, training=training)
    return folder


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_rewards_of_a_model(world, tmp_path, prompts, reward_model, layout):
    """The value at the last token of prompt and answer, by a forward of the whole model on one rank."""
    training = {"reward_function": None, "reward_model": reward_model}
    ranks = world(2)(generating.train, "grpo", str(tmp_path), prompts, training=training, parallel=LAYOUTS[layout])
    rollout = ranks[0]["rollout"]
    ends = [int(np.flatnonzero(mask)[-1]) + 1 for mask in rollout["loss_mask"]]
    (values,) = world(1)(values_of, reward_model, rollout["tokens"])
    np.testing.assert_allclose(rollout["rewards"], values[np.arange(len(ends)), ends], atol=1e-5)
    assert np.ptp(rollout["rewards"]) > 1e-4


def values_of(folder, tokens):
    """Values `[n, s]` of a reward model, sequence by sequence."""
    from mindspore import Tensor

    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.testing.parity.runner import start
    from mindspeed_ms.training.checkpointing import load_checkpoint
    from mindspeed_ms.training.model_setup import get_model

    runs.reset()
    config = runs.configuration("orm", folder, "data", model=generating.SMALL)
    start(config, 7)
    model = get_model(lambda pre_process, post_process: GPTModel(config.model_config), config)[0]
    with open_checkpoint(find_checkpoint(folder), config) as reader:
        load_checkpoint(reader, [model])
    model.set_train(False)
    return np.concatenate([model(Tensor(row[None]), None, None).asnumpy() for row in tokens])


def test_wrong_reward_models(world, tmp_path, prompts, reward_model, policy):
    def error(**training):
        with pytest.raises(Exception) as found:
            world(1)(generating.train, "grpo", str(tmp_path / "run"), prompts, training=training)
        return str(found.value)

    assert "holds no reward model: train one with --stage orm" in error(reward_function=None, reward_model=policy)
    assert "nowhere" in error(reward_function=None, reward_model=str(tmp_path / "nowhere"))
    assert "both give the rewards; keep one" in error(reward_model=reward_model)


def test_answers_are_kept_as_long_as_a_checkpoint_needs_them(world, tmp_path, prompts):
    """Also for a run that saves elsewhere."""
    base = {**SEVERAL, "training_iters": 12, "save_enabled": True, "resume_training": True}
    (whole,) = world(1)(generating.train, "grpo", str(tmp_path / "whole"), prompts, "dense", training=base)
    kept = {"keep_checkpoint_max": 1, "save_interval": 6, "exit_interval": 10}
    folder = tmp_path / "half"
    world(1)(generating.train, "grpo", str(folder), prompts, "dense", training={**base, **kept})
    assert sorted(os.listdir(folder / "rollouts")) == ["rollout_0000001.npz", "rollout_0000002.npz"]
    other = {**base, "load_checkpoint": str(folder)}
    (second,) = world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, "dense", training=other)
    assert runs.curve(second)[-2:] == runs.curve(whole)[-2:]


def test_checks_of_a_start_leave_the_critic_out(tmp_path, policy):
    from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
    from mindspeed_ms.training.start_checks import check_resumed

    config = runs.configuration("grpo", tmp_path, "data", model=generating.SMALL, training={"num_generations": 4})
    check_resumed(*newest_manifest(policy, None), config, False, True)


def test_a_policy_is_converted_without_its_critic(tmp_path, policy):
    from safetensors.numpy import load_file

    words = ["--load-dir", policy, "--save-dir", str(tmp_path / "hf"), "--save-model-type", "hf", "--model-type-hf", "llama"]
    done = subprocess.run([sys.executable, "convert_ckpt.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the critic's head, and the optimizer's state, are left out" in done.stderr + done.stdout
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert "lm_head.weight" in load_file(file) and not [name for name in load_file(file) if "reward" in name]


def test_records_without_a_prompt_are_named(world, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"instruction": "Say it.", "output": ""}\n{"instruction": "", "output": ""}\n', encoding="utf-8")
    generating.write_prompts(str(tmp_path))
    (tmp_path / "tokenizer").mkdir()
    tokenizer = {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": write_tokenizer(tmp_path / "tokenizer"),
        "prompt_type": "qwen",
    }
    model = {"vocab_size": 1024, "seq_length": 128}
    for _ in range(2):
        with pytest.raises(Exception, match=r"not every record has a prompt: .*no question") as error:
            world(1)(generating.train, "grpo", str(tmp_path / "run"), str(data), dataset=tokenizer, model=model)
        assert f"{data}, line 2" in str(error.value)
