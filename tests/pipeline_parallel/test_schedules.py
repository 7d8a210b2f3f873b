"""The schedules' own contract: evaluation, collected data, groups, overlap, lengths, messages that do not match."""

import numpy as np
import pytest

from mindspeed_ms.core.pipeline_parallel.p2p_communication import PipelineMismatchError
from mindspeed_ms.testing import small_trainings as job

PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"


def evaluate(parallel, with_data=False, dropout=0.5):
    """Loss of an evaluation over two global batches, and what the last rank got as non-loss data."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.evaluation import evaluate as run
    from mindspeed_ms.training.forward_step import forward_step

    all_config = job.make_config({**job.TIED, "hidden_dropout": dropout}, parallel)
    model, _, _ = job.build(all_config)
    data = job.batches(3)
    batches = (micro for step in range(3) for micro in micro_batches(local_batch(data, step, 1), 1))
    losses, collected = run(forward_step, batches, model, 2, (lambda *_: None) if with_data else None)
    left = sum(1 for _ in batches)
    training = all(chunk.module.training for chunk in model)
    values = None if collected is None else [float(value.asnumpy()) for value in collected]
    return losses["lm loss"], values, left, training, parallel_state.is_pipeline_last_stage(ignore_virtual=True)


@pytest.mark.parametrize("parallel", [PP2, PP4, VPP2, {**VPP2, "overlap_p2p_comm": False}], ids=str)
def test_evaluation_equals_one_rank(world, parallel):
    """Forward only: dropout is off, all ranks know the loss, non-loss data is where the model ends."""
    ((expected, expected_values, _, _, _),) = world(1)(evaluate, {}, True)
    for loss, values, left, training, is_last in world(job.world_size(parallel))(evaluate, parallel, True):
        assert abs(loss / expected - 1) < 1e-6 and left == 0 and training
        assert len(values) == (8 if is_last else 0)
        np.testing.assert_allclose(values or expected_values, expected_values, rtol=1e-6)


@pytest.mark.parametrize(
    "forms",
    [
        ({**VPP2, "overlap_p2p_comm": True}, {**VPP2, "overlap_p2p_comm": False}),
        (VPP2, {**VPP2, "variable_seq_lengths": True}),
        (VPP2, {**VPP2, "deallocate_pipeline_outputs": False}),
        (PP4, {**PP4, "variable_seq_lengths": True}),
        (PP4, {**PP4, "communication_backend": "mccl"}),
        (VPP2, {**VPP2, "communication_backend": "mccl"}),
    ],
    ids=["overlap", "shapes_interleaved", "deallocate", "shapes", "mccl", "mccl_interleaved"],
)
def test_how_tensors_travel_does_not_matter(world, forms):
    """Bit-equal whatever moves the tensors."""
    first, second = (world(job.world_size(form))(job.train, job.TIED, form, steps=2) for form in forms)
    for one, other in zip(first, second):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
        assert all(np.array_equal(array, other["weights"][name][1]) for name, (_, array) in one["weights"].items())


@pytest.mark.parametrize("group", [2, 3, 4, 8])
def test_group_size_does_not_matter(world, group):
    """Megatron's newer rule: another order of work, the same numbers up to rounding."""
    reference = world(2)(job.train, job.TIED, VPP2, steps=2)
    job.assert_equal_trainings(world(2)(job.train, job.TIED, {**VPP2, GROUP: group}, steps=2), reference, tied=True)


def train_on_lengths(parallel, lengths):
    """One step whose micro-batches have these sequence lengths; (loss, norm)."""
    from mindspore import Tensor

    _, _, step = job.build(job.make_config(job.UNTIED, parallel))
    random = np.random.RandomState(3)
    batches = []
    for length in lengths:
        tokens = random.randint(0, 64, (1, length + 1)).astype(np.int32)
        positions = np.arange(length, dtype=np.int32)[None]
        batches.append(
            {
                "tokens": Tensor(tokens[:, :-1]),
                "labels": Tensor(tokens[:, 1:]),
                "loss_mask": Tensor(np.ones((1, length), np.float32)),
                "position_ids": Tensor(positions),
            }
        )
    report, _ = step(iter(batches), 1)
    return report.loss, report.grad_norm


def plans(parallel):
    from mindspeed_ms.core.pipeline_parallel import schedules

    made, build = [], schedules._plan
    schedules._plan = lambda *arguments: made.append(build(*arguments)) or made[-1]
    try:
        train_on_lengths(parallel, [16] * 8)
    finally:
        schedules._plan = build
    return [plan.overlap for plan in made]


@pytest.mark.parametrize("exchanged", [False, True])
def test_exchanging_shapes_excludes_overlap(world, exchanged):
    parallel = {**VPP2, "overlap_p2p_comm": True, "variable_seq_lengths": exchanged}
    assert world(2)(plans, parallel) == [[not exchanged]] * 2


LENGTHS = [16, 8, 12, 16, 4, 10, 16, 6]


@pytest.mark.parametrize("parallel", [PP2, VPP2, {**PP2, "tensor_model_parallel_size": 2, "sequence_parallel": True}], ids=str)
def test_batches_of_different_length(world, parallel):
    ((loss, norm),) = world(1)(train_on_lengths, {}, LENGTHS)
    for found in world(job.world_size(parallel))(train_on_lengths, {**parallel, "variable_seq_lengths": True}, LENGTHS):
        np.testing.assert_allclose(found, (loss, norm), rtol=1e-5)


def test_another_length_than_configured_is_an_error(world):
    """It names both ranks and both shapes, and what to set."""
    with pytest.raises(PipelineMismatchError) as caught:
        world(2)(train_on_lengths, PP2, [12] * 8)
    text = str(caught.value)
    for part in ("stage 0 (rank 0)", "stage 1 (rank 1)", "(12, 1, 32)", "(16, 1, 32)", "variable_seq_lengths"):
        assert part in text


def has_overlap(parallel):
    """Whether the plan of a step starts its transfers early."""
    from unittest import mock

    from mindspeed_ms.core.pipeline_parallel import schedules

    with mock.patch.object(schedules, "_plan", wraps=schedules._plan) as plan:
        train_on_lengths(parallel, [16] * 8)
    return plan.call_args.args[-1]


@pytest.mark.parametrize(
    "parallel, expected",
    [(VPP2, True), ({**VPP2, "variable_seq_lengths": True}, False), ({**VPP2, "overlap_p2p_comm": False}, False), (PP2, False)],
    ids=["default", "lengths", "off", "pp2"],
)
def test_transfers_overlap_where_the_shapes_are_known(world, parallel, expected):
    """Exchanged shapes make a transfer complete at once: started early it would hold its memory for longer."""
    assert world(2)(has_overlap, parallel) == [expected] * 2


def stages_that_disagree(wider_rank, what):
    """One rank was given another configuration."""
    from mindspeed_ms.core import comm

    fields = {**job.TIED, **(what if comm.get_rank() == wider_rank else {})}
    _, _, step = job.build(job.make_config(fields, PP2))
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

    data = job.batches(1, fields["seq_length"])
    step(micro_batches(local_batch(data, 0, 1), 1), 1)


@pytest.mark.parametrize(
    "rank, what, shapes",
    [(0, {"hidden_size": 64}, ("[16, 1, 64]", "[16, 1, 32]")), (1, {"seq_length": 8}, ("[16, 1, 32]", "[8, 1, 32]"))],
)
def test_a_stage_that_expects_another_shape(world, rank, what, shapes):
    """The receiver's error names both ranks and both shapes."""
    with pytest.raises(PipelineMismatchError) as caught:
        world(2)(stages_that_disagree, rank, what)
    text = str(caught.value)
    assert all(part in text for part in ("rank 0", "rank 1", *shapes)), text


def finalized():
    """Tokens that gradients were finalized with: by evaluation, mean losses, losses per token."""
    from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.forward_step import forward_step

    model, _, _ = job.build(job.make_config(job.UNTIED, {}))
    tokens = []
    for forward_only, per_token in ((True, False), (False, False), (False, True)):
        for chunk in model:
            chunk.calculate_per_token_loss = per_token
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=micro_batches(local_batch(job.batches(1), 0, 1), 1),
            model=model,
            num_microbatches=2,
            forward_only=forward_only,
            backward_scale=BackwardScale(1.0, 2, per_token),
            finalize_model_grads_func=lambda _chunks, number: tokens.append(number),
        )
    return tokens


def test_gradients_are_finalized_after_a_backward_with_the_tokens_that_divide_them(world):
    ((means, per_token),) = world(1)(finalized)
    assert means is None and 0 < per_token <= 2 * job.SIZES["seq_length"], (means, per_token)


def left_by_a_step(parallel):
    """Virtual rank before and after a step, input tensors that the model still holds, backwards that only accumulated."""
    from unittest import mock

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.distributed import DistributedDataParallel

    model, _, step = job.build(job.make_config(job.TIED, parallel))
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

    if len(model) > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(1)  # a step ends with chunk 0
    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    accumulated, original = [], DistributedDataParallel.no_sync
    with mock.patch.object(
        DistributedDataParallel, "no_sync", lambda chunk: (accumulated.append(id(chunk)), original(chunk))[1]
    ):
        step(micro_batches(local_batch(job.batches(1), 0, 1), 1), 1)
    held = [
        name
        for chunk in model
        for name, cell in chunk.module.cells_and_names()
        if getattr(cell, "input_tensor", None) is not None
    ]
    counts = [accumulated.count(id(chunk)) for chunk in model]
    return before, parallel_state.get_virtual_pipeline_model_parallel_rank(), held, counts


@pytest.mark.parametrize("parallel", [{}, PP2, VPP2], ids=["one", "pp2", "pp2vpp2"])
def test_the_state_after_a_step(world, parallel):
    """All backwards of a chunk but the last one accumulate; nothing of the step is left."""
    for before, after, held, counts in world(job.world_size(parallel))(left_by_a_step, parallel):
        assert before == after and held == []
        assert counts == [job.GLOBAL_BATCH - 1] * (2 if parallel is VPP2 else 1)


def call(case):
    """A schedule with a mistake in its arguments."""
    from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func

    model, _, _ = job.build(job.make_config(job.TIED, VPP2))
    arguments = {"forward_step_func": None, "data_iterator": iter(()), "model": model, "num_microbatches": 4}
    if case == "chunks":
        arguments["model"] = model[0]
    elif case == "iterators":
        arguments["data_iterator"] = [iter(())]
    elif case == "micro_batches":
        arguments["num_microbatches"] = 3
    elif case == "non_loss":
        arguments["collect_non_loss_data"] = True
    elif case in ("decoder_seq_length", "first_val_step"):
        arguments[case] = 1
    else:
        arguments["forward_step_func"] = lambda iterator, chunk: ((1, 2), None)
    get_forward_backward_func()(**arguments)


@pytest.mark.parametrize(
    "case, text",
    [
        ("chunks", "model has 1 entries: expected 2"),
        ("iterators", "data_iterator has 1 entries: expected 2"),
        ("micro_batches", "last group of 1"),
        ("non_loss", "forward_only"),
        ("decoder_seq_length", "encoder and decoder"),
        ("first_val_step", "fp8"),
        ("output", "hidden states, one Tensor"),
    ],
)
def test_wrong_arguments(world, case, text):
    with pytest.raises(ValueError, match=text):
        world(2)(call, case)
