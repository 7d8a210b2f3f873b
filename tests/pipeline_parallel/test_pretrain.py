"""pretrain over pipeline stages: metrics, evaluation, checkpoints of all chunks, batches of the guide's form."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job
from tests.training.test_pretrain import read_metrics

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
STEPS = 6


class Rows:
    """The rows of the job's batches by index."""

    def __init__(self, steps, seed):
        data = job.batches(steps, seed=seed)
        self.data = {name: values.reshape(-1, values.shape[-1]) for name, values in data.items()}

    def __len__(self):
        return len(self.data["tokens"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.data.items()}


def pretrain_with(folder, parallel, forward_step=None, **training):
    """`{"loss", "grad_norm", "valid_loss"}` as logged, `params_norm` and the final weights."""
    from mindspeed_ms.core import comm, parallel_state
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.training import pretrain

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    all_config = job.make_config(
        job.TIED,
        parallel,
        training={
            "output_dir": str(folder),
            "training_iters": STEPS,
            "eval_interval": 3,
            "eval_iters": 2,
            "seed": 7,
            "log_params_norm": True,
            **training,
        },
    )

    def model_provider(pre_process=True, post_process=True):
        return GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)

    run = pretrain(
        lambda numbers: (Rows(STEPS, 0), Rows(4, 1), None),
        model_provider,
        None,
        all_config=all_config,
        forward_step_func=forward_step and forward_step(),
    )
    comm.world_group().barrier()
    lines = read_metrics(folder)
    result = {key: [line[key] for line in lines if key in line] for key in ("loss", "grad_norm", "valid_loss")}
    result["weights"] = {
        name: (param.sharding, param.asnumpy().copy())
        for chunk in run.model
        for name, param in chunk.module.parameters_and_names()
    }
    return result


def megatron_forward_step():
    """Megatron's form: it reads the iterator itself, asks for its stage, and reports (sum, tokens)."""
    from functools import partial

    from mindspore import mint

    from mindspeed_ms.core import parallel_state

    def loss_func(loss_mask, loss):
        tokens = mint.sum(loss_mask)
        total = loss * tokens
        return total, tokens, {"lm loss": (total, tokens), "last stage": loss * 0 + 2.0}

    def forward_step(data_iterator, model):
        assert model.module.pre_process == parallel_state.is_pipeline_first_stage()
        assert model.module.post_process == parallel_state.is_pipeline_last_stage()
        batch = next(data_iterator)
        return model(**batch), partial(loss_func, batch["loss_mask"])

    return forward_step


@pytest.fixture(scope="module")
def reference(world, tmp_path_factory):
    return world(1)(pretrain_with, tmp_path_factory.mktemp("single"), {})


@pytest.mark.parametrize("parallel", [PP2, VPP2], ids=["pp2", "pp2vpp2"])
@pytest.mark.parametrize("form", [None, megatron_forward_step], ids=["own", "megatron"])
def test_equals_one_rank(world, tmp_path, reference, parallel, form):
    results = world(2)(pretrain_with, tmp_path, parallel, form)
    assert len(reference[0]["loss"]) == STEPS and len(reference[0]["valid_loss"]) >= 2
    job.assert_equal_trainings(results, reference, tied=True)
    for result in results:
        np.testing.assert_allclose(result["valid_loss"], reference[0]["valid_loss"], rtol=1e-5)


def with_and_without_a_seed_of_the_script(folder):
    from mindspeed_ms.training.utils import set_seed

    losses = [pretrain_with(folder / "first", {})["loss"]]
    set_seed(11)
    return [*losses, *(pretrain_with(folder / name, {})["loss"] for name in ("second", "third"))]


def test_every_run_of_a_process_is_seeded(world, tmp_path):
    """By `set_seed` for the run that follows, else by the configuration."""
    ((first, second, third),) = world(1)(with_and_without_a_seed_of_the_script, tmp_path)
    assert second != first and third == first


def in_two_parts(folder, parallel):
    pretrain_with(folder, parallel, save_interval=3, exit_interval=3)
    return pretrain_with(folder, parallel, save_interval=3, resume_training=True)


@pytest.mark.parametrize("parallel", [PP2, VPP2], ids=["pp2", "pp2vpp2"])
def test_resuming_is_bit_equal(world, tmp_path, parallel):
    whole = world(2)(pretrain_with, tmp_path / "whole", parallel)
    parts = world(2)(in_two_parts, tmp_path / "parts", parallel)
    for found, expected in zip(parts, whole):
        assert found["loss"] == expected["loss"] and found["grad_norm"] == expected["grad_norm"]
        assert set(found["weights"]) == set(expected["weights"])
        for name, (_, array) in found["weights"].items():
            assert np.array_equal(array, expected["weights"][name][1]), name


def stops_on_nan(folder):
    """A NaN in the weights of one stage ends the step on all ranks, before anything is updated."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.train_step import NonFiniteLossError

    model, _, step = job.build(job.make_config(job.TIED, PP2))
    if comm.get_rank() == 0:
        from mindspeed_ms.core import storage

        param = next(iter(model[0].module.get_parameters()))
        storage.write(param, param * float("nan"))
    try:
        step(micro_batches(local_batch(job.batches(1), 0, 1), 1), 1)
    except NonFiniteLossError as error:
        return str(error)
    return None


def test_a_loss_that_is_no_number_ends_all_ranks(world, tmp_path):
    texts = world(2)(stops_on_nan, tmp_path)
    assert texts[0] == texts[1] and "rank 1 (micro-batch 0)" in texts[0]


def names_without_decay():
    """`no_weight_decay_params` may name a parameter of another stage."""
    _, optimizer, _ = job.build(
        job.make_config(
            job.TIED, {"pipeline_model_parallel_size": 2}, optimizer={"no_weight_decay_params": ["position_embeddings.weight"]}
        )
    )
    return [(name, group["wd_mult"]) for group in optimizer.param_groups for name in group["names"]]


def test_names_of_other_stages(world):
    first, last = world(2)(names_without_decay)
    assert [name for name, factor in first if not factor] == ["language_model.embedding.position_embeddings.weight"]
    assert all(factor for _, factor in last)
