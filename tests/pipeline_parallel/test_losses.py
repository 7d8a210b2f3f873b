"""The three values of a loss, the backward scale under context parallelism, auxiliary losses on the first stage."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job

LOSS_SCALE, WEIGHT = 256.0, 0.125
PP2 = {"pipeline_model_parallel_size": 2}


def gradients(parallel, per_token, with_auxiliary=True, fp16=True):
    """`{name: unscaled main_grad}` of a step whose loss has a term that the first stage's embedding alone decides: attached
    there in a pipeline, added to the main loss on one rank."""
    import mindspore as ms

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.distributed import finalize_model_grads
    from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, MicroBatchLoss, attach_auxiliary_loss
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.losses import count_tokens, loss_function

    training = {"fp16": fp16, "accumulate_allreduce_grads_in_fp32": True, "calculate_per_token_loss": per_token}
    model, _, _ = job.build(job.make_config(job.UNTIED, parallel, training=training))
    first = parallel_state.is_pipeline_first_stage()

    def forward_step(iterator, chunk):
        batch = next(iterator)
        output, auxiliary = chunk(**batch), None
        if first and with_auxiliary:
            weight = WEIGHT * (job.SIZES["seq_length"] if per_token else 1)
            auxiliary = weight * chunk.module.language_model.embedding.word_embeddings.weight.float().square().sum()
        if auxiliary is not None and parallel:
            output, auxiliary = attach_auxiliary_loss(output, auxiliary), None

        def loss_func(output):
            loss = loss_function(count_tokens(batch), per_token, output)
            if auxiliary is None:
                return loss
            return MicroBatchLoss(loss.differentiated + auxiliary, loss.reported, loss.tokens)

        return output, loss_func

    for chunk in model:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=micro_batches(local_batch(job.batches(1), 0, 1), 1),
        model=model,
        num_microbatches=job.GLOBAL_BATCH,
        backward_scale=BackwardScale(LOSS_SCALE, job.GLOBAL_BATCH, per_token),
        finalize_model_grads_func=finalize_model_grads,
    )
    return {
        name: param.main_grad.astype(ms.float32).asnumpy() / LOSS_SCALE
        for chunk in model
        for name, param in chunk.module.parameters_and_names()
    }


@pytest.mark.parametrize("fp16", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per_token"])
def test_an_auxiliary_loss_on_the_first_stage(world, per_token, fp16):
    tolerance = 2e-3 if fp16 else 1e-5
    (expected,) = world(1)(gradients, {}, per_token, True, fp16)
    (without,) = world(1)(gradients, {}, per_token, False, fp16)
    embedding = job.WORD_EMBEDDINGS
    assert np.linalg.norm(expected[embedding] - without[embedding]) > 0.1 * np.linalg.norm(without[embedding])
    first, last = world(2)(gradients, PP2, per_token, True, fp16)
    found = {**first, **last}
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert np.linalg.norm(found[name] - values) <= tolerance * np.linalg.norm(values), name


def reported_losses(parallel, fields, clashes=False):
    """Reported losses of a step whose layers each attach a term."""
    from unittest import mock

    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import attach_auxiliary_loss
    from mindspeed_ms.legacy.model.transformer_layer import ParallelTransformerLayer
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

    original, name = ParallelTransformerLayer.construct, "lm loss" if clashes else "size"

    def construct(layer, *args, **kwargs):
        output = original(layer, *args, **kwargs)
        return attach_auxiliary_loss(output, WEIGHT * output.float().square().mean(), name)

    finalized = []
    _, _, step = job.build(job.make_config({**job.UNTIED, **fields}, parallel))
    original_finalize = step.finalize
    step.finalize = lambda model, tokens: (original_finalize(model, tokens), finalized.append(len(model)))
    with mock.patch.object(ParallelTransformerLayer, "construct", construct):
        report, _ = step(micro_batches(local_batch(job.batches(1), 0, 1), 1), 1)
    return report.losses, report.grad_norm, len(finalized)


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "parallel, fields",
    [({}, RECOMPUTED), (PP2, {}), ({**PP2, "virtual_pipeline_model_parallel_size": 2}, RECOMPUTED)],
    ids=["recomputed", "pp2", "pp2vpp2 recomputed"],
)
def test_named_auxiliary_losses_are_reported_from_every_stage(world, parallel, fields):
    (expected,) = world(1)(reported_losses, {}, {})
    assert list(expected[0]) == ["lm loss", "size"] and expected[0]["size"] > 0.0
    for losses, norm, finalized in world(job.world_size(parallel))(reported_losses, parallel, fields):
        assert losses == pytest.approx(expected[0], rel=1e-6) and norm == pytest.approx(expected[1], rel=1e-5)
        assert list(losses) == ["lm loss", "size"] and finalized == 1


def test_a_name_of_an_auxiliary_loss_that_the_loss_function_has(world):
    with pytest.raises(ValueError, match="attach_auxiliary_loss both report lm loss"):
        world(1)(reported_losses, {}, {}, True)


def scales():
    """Scales of losses over numbers of tokens, as numbers and as Tensors, which must not be read."""
    from unittest import mock

    import mindspore as ms
    from mindspore import Tensor

    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, filled

    scale = BackwardScale(1024.0, 3, context_parallel_size=2)
    counts = [0, 1, 7, 1000, 4097]
    tensors = [Tensor(float(count), ms.float32) for count in counts]
    with mock.patch.object(Tensor, "asnumpy", side_effect=AssertionError("read")):
        found = [filled((1,), scale.of(tensor), ms.float32) for tensor in tensors]
    return [value.asnumpy() for value in found], [filled((1,), scale.of(count), ms.float32).asnumpy() for count in counts]


def test_a_number_of_tokens_on_the_device_is_not_read(world):
    ((found, expected),) = world(1)(scales)
    np.testing.assert_array_equal(found, expected)
    assert found[0].shape == (1,)


def context_parallel_step(per_token, mask):
    """(gradient of one weight as data parallelism completes it, reported loss): two ranks share a sequence of 6 tokens, which
    are counted by the mask, or by the labels if there is none."""
    import mindspore as ms
    from mindspore import Parameter, Tensor

    from mindspeed_ms.core import autograd, comm, parallel_state
    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, as_float, filled
    from mindspeed_ms.training.loss_func import LossWithMask
    from mindspeed_ms.training.losses import LossReducer, count_tokens, loss_function

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    part = slice(3 * comm.get_rank(), 3 * comm.get_rank() + 3)
    values, weights = Tensor(VALUES[part]), Tensor((ALL if mask is None else mask)[part])
    weight = Parameter(Tensor(2.0, ms.float32), name="weight")
    autograd.enable_tape()
    mean = LossWithMask(lambda logits, label: logits * weight)(values, None, weights)
    tokens = count_tokens({"labels": values} if mask is None else {"loss_mask": weights})
    loss = loss_function(tokens, per_token, mean)
    scale = BackwardScale(1.0, 1, per_token)
    autograd.backward(loss.differentiated, filled((), scale.of_main_loss(loss), ms.float32))
    group = comm.world_group()
    total = sum(group.all_gather_object(float(autograd.tensor_grad(weight).asnumpy())))
    divisor = sum(group.all_gather_object(as_float(loss.tokens))) if per_token else group.size
    losses = LossReducer().reduce([loss.reported])
    return total / divisor, losses.values["lm loss"], losses.tokens


VALUES = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 11.0], np.float32)
MASK = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], np.float32)
ALL = np.ones(6, np.float32)


@pytest.mark.parametrize("mask", [MASK, None], ids=["masked", "all"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per_token"])
def test_context_parallelism_multiplies_the_gradient_and_not_the_report(world, per_token, mask):
    weights = ALL if mask is None else mask
    mean = float((VALUES * weights).sum() / weights.sum())
    for gradient, reported, tokens in world(2)(context_parallel_step, per_token, mask):
        assert gradient == pytest.approx(mean) and reported == pytest.approx(2.0 * mean) and tokens == weights.sum()


def test_the_backward_scale():
    """Of means and sums; with tokens that are 0; published within a step only."""
    from mindspeed_ms.core.pipeline_parallel import micro_batch_loss
    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, MicroBatchLoss

    mean, sums = BackwardScale(2.0, 4, False, 3), BackwardScale(2.0, 4, True, 3)
    assert [mean.of(), mean.of(5.0), mean.of(0.0)] == [1.5, 0.3, 1.5]
    assert sums.of_main_loss(MicroBatchLoss(None, {}, 5.0)) == 2.0
    with pytest.raises(ValueError, match=r"must return .*number of tokens"):
        sums.of_main_loss(MicroBatchLoss(None, {}))
    before = micro_batch_loss.get_backward_scale()
    with pytest.raises(KeyError), micro_batch_loss.published(mean):
        assert micro_batch_loss.get_backward_scale() is mean
        raise KeyError
    assert micro_batch_loss.get_backward_scale() is before


def mode_of_a_step():
    """Training mode before and after a step, and the same around an evaluation."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.evaluation import evaluate

    model, _, step = job.build(job.make_config(job.UNTIED, {}))
    for chunk in model:
        chunk.set_train(False)
    modes, data = [model[0].training], local_batch(job.batches(1), 0, 1)
    evaluate(step.forward_step_func, micro_batches(data, 1), model, 1)
    modes.append(model[0].training)
    step(micro_batches(data, 1), 1)
    modes.append(model[0].training and all(cell.training for _, cell in model[0].cells_and_names()))
    evaluate(step.forward_step_func, micro_batches(data, 1), model, 1)
    return [*modes, model[0].training, calculator.get_num_microbatches()]


def test_a_step_puts_the_model_in_training_mode(world):
    assert world(1)(mode_of_a_step) == [[False, False, True, True, job.GLOBAL_BATCH]]


def divided_by(parallel):
    """The number of tokens that gradients are divided by where each rank has counted 5."""
    from types import SimpleNamespace

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.distributed import finalize_model_grads

    parallel_state.initialize_model_parallel(**parallel)
    factors = []
    chunk = SimpleNamespace(
        routers_with_bias=list,
        finish_grad_sync=lambda: None,
        trainable_parameters=list,
        scale_gradients=lambda factor: factors.append(factor),
    )
    finalize_model_grads([chunk], 5.0)
    return 1.0 / factors[0]


@pytest.mark.parametrize("parallel, expected", [({}, 10.0), (PP2, 5.0), ({"context_parallel_size": 2}, 10.0)], ids=str)
def test_tokens_of_the_global_batch(world, parallel, expected):
    """Those of the last stage; context-parallel ranks have parts of a sequence."""
    assert world(2)(divided_by, parallel) == pytest.approx([expected] * 2)
