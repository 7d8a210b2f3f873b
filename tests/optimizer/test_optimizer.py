"""Buffers, AdamW, SGD, norms and loss scales against float64 references, on one and several ranks."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

SHAPES = {"first.weight": (6, 4), "first.bias": (6,), "norm.weight": (6,), "last.weight": (5, 6)}
NO_DECAY = ("first.bias", "norm.weight")


def initial_values(seed=3):
    generator = np.random.RandomState(seed)
    return {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}


def gradients(step, rank=0, scale=1.0):
    generator = np.random.RandomState(100 * step + rank)
    return {name: scale * generator.standard_normal(shape) for name, shape in SHAPES.items()}


class Weights(nn.Cell):
    """Parameters whose gradients are whatever the batch says: loss = sum of parameter * entry."""

    def __init__(self, values, dtype):
        super().__init__()
        self.table = {}
        for name, value in values.items():
            parameter = Parameter(Tensor(value.astype(np.float32)).astype(dtype), name=name)
            setattr(self, name.replace(".", "_"), parameter)
            self.table[name] = parameter

    def parameters_and_names(self, name_prefix="", expand=True):
        return list(self.table.items())

    def construct(self, **entries):
        parts = [mint.sum(self.table[name].astype(ms.float32) * entry) for name, entry in entries.items()]
        return sum(parts[1:], parts[0])


def make(dtype=ms.float32, ddp=None, values=None, mark=None, tp=1, **options):
    """(model chunk, optimizer) of the small model on an initialised grid."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from mindspeed_ms.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    cell = Weights(values or initial_values(), dtype)
    if mark is not None:
        mark(cell)
    chunk = DistributedDataParallel(None, DistributedDataParallelConfig(**(ddp or {})), cell)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.0, **options}
    return chunk, get_megatron_optimizer(OptimizerConfig(**settings), [chunk])


def run_backward(chunk, entries, seed=1.0):
    from mindspeed_ms.core import autograd

    loss = chunk(**{name: Tensor(value.astype(np.float32)) for name, value in entries.items()})
    autograd.backward(loss, Tensor(np.float32(seed)))


def take_step(chunk, optimizer, micro_batches, seed=1.0):
    from mindspeed_ms.core.distributed import finalize_model_grads

    optimizer.zero_grad()
    for number, entries in enumerate(micro_batches):
        if number < len(micro_batches) - 1:
            with chunk.no_sync():
                run_backward(chunk, entries, seed)
        else:
            run_backward(chunk, entries, seed)
    finalize_model_grads([chunk])
    return optimizer.step()


def reference_adamw(values, grads_of_steps, lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.0):
    """AdamW in float64; returns (values, norms)."""
    values = {name: value.astype(np.float32).astype(np.float64) for name, value in values.items()}
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    norms = []
    for step, grads in enumerate(grads_of_steps, 1):
        norms.append(math.sqrt(sum(float((grad**2).sum()) for grad in grads.values())))
        factor = min(1.0, clip / (norms[-1] + 1e-6)) if clip else 1.0
        for name, value in values.items():
            grad = grads[name] * factor
            first[name] = beta1 * first[name] + (1 - beta1) * grad
            second[name] = beta2 * second[name] + (1 - beta2) * grad**2
            decay = 0.0 if name in NO_DECAY else weight_decay
            root = np.sqrt(second[name] / (1 - beta2**step)) + eps
            values[name] = value * (1 - lr * decay) - lr * first[name] / (1 - beta1**step) / root
    return values, norms


def parameters_of(chunk):
    return {name: np.array(param.astype(ms.float32).asnumpy()) for name, param in chunk.module.parameters_and_names()}


def assert_close(found, expected, tolerance=2e-6):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def adamw_steps(clip, ddp):
    chunk, optimizer = make(ddp=ddp, clip_grad=clip)
    norms = []
    for step in range(5):
        success, norm, _ = take_step(chunk, optimizer, [gradients(step), gradients(step, 1)])
        assert success
        norms.append(norm)
    return parameters_of(chunk), norms, len(optimizer.shards[0].runs), len(chunk.buffers[0].buckets)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_adamw_equals_float64(world, clip):
    ((found, norms, runs, buckets),) = world(1)(adamw_steps, clip, {})
    sums = [{name: gradients(step)[name] + gradients(step, 1)[name] for name in SHAPES} for step in range(5)]
    expected, expected_norms = reference_adamw(initial_values(), sums, clip=clip)
    assert_close(found, expected)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
    # decay: last.weight | none: norm.weight, first.bias | decay: first.weight
    assert (runs, buckets) == (3, 1)


def test_bucket_sizes_overlap_and_alignment_change_nothing(world):
    (plain,) = world(1)(adamw_steps, 1.0, {})
    for ddp in (
        {"overlap_grad_reduce": True, "bucket_size": 1},
        {"overlap_grad_reduce": True, "bucket_size": 30},
        {"enable_mem_align": True},
        {"use_distributed_optimizer": True},
    ):
        ((found, norms, _, buckets),) = world(1)(adamw_steps, 1.0, ddp)
        assert all(np.array_equal(found[name], plain[0][name]) for name in SHAPES)
        assert norms == pytest.approx(plain[1], rel=1e-12)
        assert buckets == {1: 4, 30: 2}.get(ddp.get("bucket_size"), 1)


def data_parallel_steps(ddp):
    from mindspeed_ms.core import comm

    rank, size = comm.get_rank(), comm.get_world_size()
    # other initial values on rank 1: the first rank's must win
    chunk, optimizer = make(ddp=ddp, clip_grad=1.0, values=initial_values(3 + rank))
    norms = [
        take_step(chunk, optimizer, [gradients(step, 4 * micro + rank, size / 2) for micro in range(2)])[1] for step in range(4)
    ]
    return parameters_of(chunk), norms


@pytest.mark.parametrize("ddp", [{}, {"overlap_grad_reduce": True, "bucket_size": 10}, {"average_in_collective": True}])
def test_two_data_parallel_ranks_average(world, ddp):
    (first, norms), (second, other_norms) = world(2)(data_parallel_steps, ddp)
    means = [
        {name: sum(gradients(step, 4 * micro + rank)[name] for micro in range(2) for rank in range(2)) / 2 for name in SHAPES}
        for step in range(4)
    ]
    expected, expected_norms = reference_adamw(initial_values(), means, clip=1.0)
    assert_close(first, expected)
    assert norms == other_norms
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
    assert all(np.array_equal(first[name], second[name]) for name in SHAPES)


def tensor_parallel_norm():
    """Matrices cut over two ranks, vectors copied; last.weight is all ones."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.optimizer.clip_grads import ModelStatistics

    rank = comm.get_rank()

    def mark(cell):
        for name, parameter in cell.table.items():
            parameter.tensor_model_parallel = name in ("first.weight", "last.weight")
            parameter.sequence_parallel = name == "norm.weight"

    chunk, optimizer = make(mark=mark, tp=2, clip_grad=0.5)
    entries = {name: np.ones(shape) for name, shape in SHAPES.items()}
    entries["norm.weight"] = np.full(6, 0.25 if rank else 0.75)  # each rank saw a part of the sequence
    success, norm, _ = take_step(chunk, optimizer, [entries])
    zeros = ModelStatistics(optimizer.shards).num_zeros()
    moments = {piece.name: np.array(state["exp_avg"].asnumpy()) for piece, state in optimizer.pieces_with_states()}
    return norm, zeros, moments, success


def test_norm_counts_copies_once_and_parts_fully(world):
    results = world(2)(tensor_parallel_norm)
    elements = 2 * (24 + 30) + 6 + 6
    for norm, zeros, moments, success in results:
        assert success and zeros == 0
        assert norm == pytest.approx(math.sqrt(elements), rel=1e-12)
        coefficient = 0.5 / (math.sqrt(elements) + 1e-6)
        for name, moment in moments.items():
            np.testing.assert_allclose(moment, 0.1 * coefficient, rtol=1e-6, err_msg=name)


def infinite_on_one_rank(name, tp, ddp):
    """(success, unchanged) of a step where the gradient of a parameter is infinite in rank 1's memory alone."""
    from mindspeed_ms.core import comm, storage
    from mindspeed_ms.core.distributed import finalize_model_grads

    def mark(cell):
        for weight in ("first.weight", "last.weight"):
            cell.table[weight].tensor_model_parallel = tp > 1

    chunk, optimizer = make(mark=mark, tp=tp, ddp=ddp)
    before = parameters_of(chunk)
    optimizer.zero_grad()
    run_backward(chunk, gradients(0))
    finalize_model_grads([chunk])
    if comm.get_rank() == 1:
        for shard in optimizer.shards:
            for piece in shard.pieces:
                if name in (None, piece.name):
                    grad = shard.slice_grad(piece.start, piece.stop)
                    storage.write(grad, grad + np.inf)
    success, _, _ = optimizer.step()
    return success, optimizer.found_inf, all(np.array_equal(before[key], value) for key, value in parameters_of(chunk).items())


@pytest.mark.parametrize(
    "name, tp, ddp",
    [
        ("first.weight", 2, {}),
        ("norm.weight", 2, {}),  # a copy, which does not count in the norm
        (None, 1, {"use_distributed_optimizer": True}),
    ],
    ids=["own part", "copy", "shard"],
)
def test_infinity_in_the_memory_of_one_rank_is_skipped_by_all(world, name, tp, ddp):
    assert world(2)(infinite_on_one_rank, name, tp, ddp) == [(False, True, True)] * 2


def zero_gradient_step(dtype):
    chunk, optimizer = make(dtype=getattr(ms, dtype), bf16=dtype == "bfloat16", ddp={"grad_reduce_in_fp32": True})
    before = parameters_of(chunk)
    take_step(chunk, optimizer, [{"first.weight": np.zeros((6, 4))}])  # the others get no gradient at all
    return (
        before,
        parameters_of(chunk),
        {
            piece.name: np.array(state.get("fp32_param", state["exp_avg"]).asnumpy())
            for piece, state in optimizer.pieces_with_states()
        },
    )


def test_zero_gradients_decay_matrices_only(world):
    ((before, after, _),) = world(1)(zero_gradient_step, "float32")
    for name in SHAPES:
        factor = 1.0 if name in NO_DECAY else 1 - 1e-2 * 0.1
        np.testing.assert_allclose(after[name], before[name] * factor, rtol=1e-7)


def to_bfloat16(array):
    bits = np.asarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_bfloat16_parameters_are_rounded_masters(world):
    ((_, after, masters),) = world(1)(zero_gradient_step, "bfloat16")
    for name in SHAPES:
        assert np.array_equal(after[name], to_bfloat16(masters[name]))


def sgd_steps(momentum):
    chunk, optimizer = make(optimizer="sgd", sgd_momentum=momentum)
    for step in range(3):
        take_step(chunk, optimizer, [gradients(step)])
    return parameters_of(chunk)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_float64(world, momentum):
    (found,) = world(1)(sgd_steps, momentum)
    values = initial_values()
    buffers = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        for name, grad in gradients(step).items():
            grad = grad + (0.0 if name in NO_DECAY else 0.1) * values[name]
            buffers[name] = momentum * buffers[name] + grad
            values[name] = values[name] - 1e-2 * buffers[name]
    assert_close(found, values)


def overflow_on_one_rank():
    from mindspeed_ms.core import comm

    chunk, optimizer = make(
        ms.float16,
        {"grad_reduce_in_fp32": True},
        fp16=True,
        initial_loss_scale=16.0,
        hysteresis=1,
        loss_scale_window=2,
        clip_grad=1.0,
    )
    history = []
    for step in range(4):
        entries = gradients(step, 0, 0.5)
        if step == 1 and comm.get_rank() == 1:
            entries["last.weight"][2, 3] = np.inf
        before = parameters_of(chunk)
        success, norm, _ = take_step(chunk, optimizer, [entries], optimizer.get_loss_scale())
        unchanged = all(np.array_equal(before[name], value) for name, value in parameters_of(chunk).items())
        history.append((success, optimizer.get_loss_scale(), optimizer.update.step_count, unchanged, norm))
    return history


def test_overflow_on_one_rank_is_skipped_by_all(world):
    first, second = world(2)(overflow_on_one_rank)
    assert (
        [row[:4] for row in first]
        == [row[:4] for row in second]
        == [(True, 16.0, 1, False), (False, 8.0, 1, True), (True, 8.0, 2, False), (True, 16.0, 3, False)]
    )
    expected = math.sqrt(sum((value.astype(np.float16).astype(float) ** 2).sum() for value in gradients(0, 0, 0.5).values()))
    assert first[0][4] == pytest.approx(expected, rel=1e-3)


def clip_by_value(loss_scale):
    chunk, optimizer = make(clip_grad=0.3, grad_clip_type="GradClipByValue", loss_scale=loss_scale)
    _, grad_norm, _ = take_step(chunk, optimizer, [gradients(0)], loss_scale or 1.0)
    norm = math.sqrt(sum((grad**2).sum() for grad in gradients(0).values()))
    assert grad_norm == pytest.approx(norm, rel=1e-6)  # before clipping
    return {piece.name: np.array(state["exp_avg"].asnumpy()) for piece, state in optimizer.pieces_with_states()}


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_clip_by_value(world, loss_scale):
    (found,) = world(1)(clip_by_value, loss_scale)
    for name, grad in gradients(0).items():
        np.testing.assert_allclose(found[name], 0.1 * np.clip(grad, -0.3, 0.3), rtol=1e-6, atol=1e-8)


def save_and_restore(dtype):
    """Two steps, saved, two more; restored into a new optimizer, the same two again."""
    options = {"dtype": getattr(ms, dtype), "bf16": dtype == "bfloat16", "ddp": {"grad_reduce_in_fp32": True}, "clip_grad": 1.0}
    if dtype == "float16":  # the loss scale grows after three steps: the third is the first of the restored ones
        options.update(fp16=True, initial_loss_scale=16.0, loss_scale_window=3)
    chunk, optimizer = make(**options)
    for step in range(2):
        take_step(chunk, optimizer, [gradients(step)], optimizer.get_loss_scale())
    counters = optimizer.counters()
    saved = {
        piece.name: {key: Tensor(np.array(value.asnumpy())) for key, value in state.items()}
        for piece, state in optimizer.pieces_with_states()
    }
    weights = {name: Tensor(value) for name, value in parameters_of(chunk).items()}
    for step in range(2, 4):
        take_step(chunk, optimizer, [gradients(step)], optimizer.get_loss_scale())
    other_chunk, other = make(**{**options, "values": initial_values(9)})
    from mindspeed_ms.core import storage

    for name, parameter in other_chunk.module.parameters_and_names():
        storage.write(parameter, weights[name])
    for piece, state in other.pieces_with_states():
        for key, value in state.items():
            storage.write(value, saved[piece.name][key])
    other.load_counters(counters)
    for step in range(2, 4):
        take_step(other_chunk, other, [gradients(step)], other.get_loss_scale())
    assert other.get_loss_scale() == optimizer.get_loss_scale() == (32.0 if dtype == "float16" else 1.0)
    return parameters_of(chunk), parameters_of(other_chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_restored_optimizer_goes_on_bit_equal(world, dtype):
    ((expected, found),) = world(1)(save_and_restore, dtype)
    assert all(np.array_equal(expected[name], found[name]) for name in SHAPES)


def wrong_settings():
    from mindspeed_ms.config.sections.optimizer import OPTIMIZERS
    from mindspeed_ms.core.optimizer import OptimizerConfig
    from mindspeed_ms.core.optimizer.update_rule import UpdateRule, update_rule

    messages = []
    for name in (name for names in OPTIMIZERS.values() for name in names):
        assert issubclass(update_rule(name), UpdateRule) and update_rule(name) is update_rule(name.swapcase())
    for options in ({"optimizer": "lion"}, {"clip_grad": -1.0}, {"grad_clip_type": "ClipEach"}):
        with pytest.raises(ValueError) as caught:
            OptimizerConfig(**options)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        make(no_weight_decay_params=["norm.weight", "gamma"])
    messages.append(str(caught.value))
    return messages


def test_wrong_settings_are_named(world):
    (messages,) = world(1)(wrong_settings)
    for message, words in zip(messages, ("'lion'", "clip_grad is -1.0", "'ClipEach'", "'gamma'")):
        assert words in message
