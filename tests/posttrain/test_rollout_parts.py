"""Parts of a rollout without a model: what is drawn, rewards of answers that do not end, what a stage adds, modes."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from mindspeed_ms.config import ConfigError
from mindspeed_ms.config.errors import Problem
from mindspeed_ms.core.datasets.prompt_dataset import RolloutPlan
from mindspeed_ms.tasks.posttrain import grpo_trainer, ppo_trainer, reward_model, rollout, rollout_forward
from mindspeed_ms.tasks.posttrain.policy_losses import generalized_advantages, whitened
from mindspeed_ms.tasks.posttrain.rewards import RewardError


def drawn(random_seed, *calls):
    """Of each call of `generate(prompts, first, count)` (seeds of its prompts, answers)."""
    seeds, sampler = [], object.__new__(rollout.Sampler)
    drawing = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9}
    sampler.settings = SimpleNamespace(random_seed=random_seed, **drawing)
    sampler.all_config, sampler.model, sampler.tokenizer, sampler.end, sampler._shares = mock.MagicMock(), [], None, 31, False

    def generate(prompts, params):
        seeds.append([one.seed for one in params])
        assert all(getattr(one, name) == value for one in params for name, value in drawing.items())
        ends = (rollout.STOP, "length")
        return [
            SimpleNamespace(sample=number, token_ids=(*prompt, number), finish_reason=ends[number])
            for prompt, one in zip(prompts, params)
            for number in range(one.n)
        ]

    def engine(runner, tokenizer, ends):
        assert tuple(ends) == (31,)
        return SimpleNamespace(generate=generate)

    with mock.patch.multiple(
        rollout, Engine=engine, ModelRunner=mock.Mock(), describe_model=mock.Mock(), vocab_size_of=mock.Mock()
    ):
        answers = [sampler.generate(*call) for call in calls]
    return seeds, answers


def test_each_prompt_of_the_training_has_draws_of_its_own():
    """By its number and the seed, however the prompts are divided into rollouts; and it is known which answers ended."""
    (one, two), answers = drawn(7, ([(1,), (2,)], 0, 2), ([(1,), (2,)], 2, 2))
    assert len({*one, *two}) == 4
    assert drawn(7, ([(1,), (2,), (1,), (2,)], 0, 2))[0] == [[*one, *two]]
    assert not {*one, *two} & set(drawn(8, ([(1,), (2,)], 0, 2))[0][0])
    assert answers[0] == [((1, 0), None, True), ((1, 1), None, False), ((2, 0), None, True), ((2, 1), None, False)]


def test_answers_that_do_not_end_pay_the_penalty():
    data = object.__new__(rollout.Rollouts)
    data.settings = SimpleNamespace(missing_eos_penalty=2.0)
    data.prompts = SimpleNamespace(place=lambda number: (f"record {number}", None))
    data.reward = SimpleNamespace(scores=lambda values, places: np.array([1.0, 1.0], np.float32))
    assert data._rewards([0, 1], [((1,), None, True), ((2,), None, False)], {}).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("epochs", [1, 2])
def test_old_log_probabilities_are_taken_where_several_steps_learn_from_them(epochs):
    plan, trainer = RolloutPlan(4, 4, epochs, 2), object.__new__(grpo_trainer.GRPOTrainer)
    trainer.trainer = SimpleNamespace(data=SimpleNamespace(plan=plan))
    found = {"rewards": np.arange(4.0)}
    with mock.patch.object(grpo_trainer, "log_probabilities_of", lambda *_: "old"):
        trainer.complete(found)
    assert found.get("old_log_probs") == (None if epochs == 1 else "old")


def test_ppo_rewards_tokens_and_reports_a_divergence_that_stays_finite():
    """Also where the reference is far from the policy."""
    mask = np.array([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.float32)
    old, values = -mask * [[1, 2, 3, 4, 5]], mask * [[0.5, 1, 0.25, 2, 3]]
    distance = mask * [[0.5, 100, -100, 0.25, 7]]  # of the reference's log-probabilities
    trainer = object.__new__(ppo_trainer.PPOTrainer)
    trainer.all_config = SimpleNamespace(training_config=SimpleNamespace(kl_coef=0.1, gamma=0.9, lam=0.8))
    trainer.reference, trainer.reference_log_probs = object(), lambda _rollout: (old + distance).astype(np.float32)
    found = {"loss_mask": mask, "rewards": np.array([10.0, 20.0])}
    with mock.patch.object(ppo_trainer, "outputs_of", lambda *_: (-old, values)):
        trainer.complete(found)
    rewards = 0.1 * distance + [[0, 0, 0, 10, 0], [0, 20, 0, 0, 0]]
    advantages, returns = generalized_advantages(rewards, values, mask, 0.9, 0.8)
    kl = np.expm1(np.minimum(distance, 20)) - distance
    expected = {
        "old_log_probs": old,
        "old_values": values,
        "returns": returns,
        "kl": kl,
        "advantages": whitened(advantages, mask),
    }
    for name, wanted in {**expected, "kl": kl}.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_rewards_that_are_not_finite_name_their_record():
    model, mask = object.__new__(reward_model.RewardModel), np.array([[1, 1, 0], [1, 0, 0]], np.float32)
    model.chunks, model.name = [], "rewards"
    values = np.array([[np.nan, np.nan, 2.0], [np.nan, np.inf, np.nan]], np.float32)
    with mock.patch.object(reward_model, "forward_only", lambda *_: values[None]):
        with pytest.raises(RewardError, match="rewards gave inf for an answer to record 5: its weights are damaged"):
            model.scores({"loss_mask": mask}, ["record 4", "record 5"])
        values[1, 1] = 3.0
        assert model.scores({"loss_mask": mask}, ["record 4", "record 5"]).tolist() == [2.0, 3.0]


def test_evaluating_keeps_the_mode_of_each_chunk():
    class Chunk:
        def __init__(self, training):
            self.training = training

        def set_train(self, mode=True):
            self.training = mode

    chunks = [Chunk(True), Chunk(False)]
    with pytest.raises(KeyError), rollout_forward.evaluating(chunks):
        assert not any(chunk.training for chunk in chunks)
        raise KeyError
    assert [chunk.training for chunk in chunks] == [True, False]


@pytest.mark.parametrize(
    "stage, tensor, text",
    [
        (None, "language_model.output_layer.weight", "holds no reward model: train one with --stage orm"),
        ("trl_ppo", "reward_head.weight", "holds no reward model: train one with --stage orm"),
        ("orm", "reward_head.weight", "whose vocabulary has 33 ids, and the policy's 64: expected the same"),
    ],
)
def test_what_is_no_reward_model_of_a_policy(stage, tensor, text):
    """Such as one of whose rows the ranks' padding alone makes as many."""
    sections = {"training_config": {"stage": stage}, "model_config": {"vocab_size": 33}}
    manifest = SimpleNamespace(args=sections, tensors={tensor: None}, vocab_size=None)
    known = {
        "find_checkpoint": lambda *_: ("place", manifest),
        "with_adapters": lambda *_: ("place", manifest, None),
        "_configuration": lambda *_: SimpleNamespace(model_config=SimpleNamespace(vocab_size=256)),
        "spelled": lambda *_: "reward_model",
    }
    config = mock.Mock(
        **{"training_config.reward_model": "folder", "model_config.vocab_size": 64, "dataset_config.vocab_size": 0}
    )
    with mock.patch.multiple(reward_model, **known), pytest.raises(RewardError, match=f"reward_model is folder, .*{text}"):
        reward_model.check_reward_model(config)


@pytest.mark.parametrize(
    "saved, experts, chunk, flags",
    [
        ({"params_dtype": "bfloat16"}, 1, None, ["--bf16"]),
        ({"compute_dtype": "float16", "params_dtype": "float32"}, 1, None, ["--fp16"]),
        ({"compute_dtype": "float32", "params_dtype": "float32"}, 1, 3, ["--num-layers-per-virtual-pipeline-stage", "3"]),
        ({}, 4, None, ["--expert-model-parallel-size", "2"]),
    ],
)
def test_a_reward_model_has_the_layout_of_the_policy_and_its_own_dtype(saved, experts, chunk, flags):
    manifest = SimpleNamespace(args={"model_config": saved, "moe_config": {"num_experts": experts}})
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 3, "expert_model_parallel_size": 2}
    sizes["num_layers_per_virtual_pipeline_stage"] = chunk
    config = SimpleNamespace(model_config=SimpleNamespace(seq_length=16), parallel_config=SimpleNamespace(**sizes))
    parser = mock.Mock(**{"return_value.parse_args": lambda words: words})
    problems = ConfigError([Problem("--load", "is odd"), Problem("--save", "is odd too")])
    with mock.patch.multiple(reward_model, argument_parser=parser, init_configs_from_args=list, require_available=mock.Mock()):
        words = reward_model._configuration(config, "place", manifest)
        reward_model.require_available.side_effect = problems
        with pytest.raises(ConfigError) as error:
            reward_model._configuration(config, "place", manifest)
    first = words.index("--pipeline-model-parallel-size")
    assert words[first - 2 : first + 2] == ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "3"]
    assert words[first + 2 :] == flags and str(error.value) == str(problems.problems[0])
