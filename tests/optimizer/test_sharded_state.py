"""What ranks hold of a sharded training, norms over all layouts, checkpoints, and settings of ZeRO."""

import math

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import padded_vocabulary
from tests.optimizer.test_zero_levels import LEVELS, assert_bit_equal, assert_close, curves
from tests.training import tiny
from tests.training.test_pretrain import run_pretrain

# ---- memory ------------------------------------------------------------------------------------------------------------


def held_bytes(step, number):
    """Watch: bytes of parameters, gradients, masters and moments, and the most that was in full within layers."""
    from mindspeed_ms.core import autograd

    (chunk,) = step.model
    if number == 0:
        step.most, step.most_backward = [], []

        def note(_cell, _args, output):
            step.most.append(chunk.whole_nbytes)
            autograd.gradient_hook(
                output[0] if isinstance(output, tuple) else output, lambda _grad: step.most_backward.append(chunk.whole_nbytes)
            )

        for layer in chunk.module.language_model.encoder.layers:
            layer.mlp.register_forward_hook(note)
    buffers = chunk.buffers
    return {
        "param": sum(buffer.param_buffer.nbytes for buffer in buffers),
        "grad": sum(buffer.grad_buffer.nbytes for buffer in buffers),
        "masters": sum(shard.nbytes for shard in step.optimizer.shards),
        "moments": step.optimizer.update.nbytes,
        "numel": sum(buffer.layout.numel for buffer in buffers),
        "now": chunk.whole_nbytes,
        "most": max(step.most, default=0),
        "most_backward": max(step.most_backward, default=0),
        "buckets": [bucket.stop - bucket.start for buffer in buffers for bucket in buffer.buckets],
    }


def train_llama(extra, watch, count=2, settings=None):
    recording = recordings.load("single_llama")
    batches = {name: values[:count] for name, values in recording.batches.items()}
    return runner.run(recording.flags, ["--micro-batch-size", "1", *extra], batches, watch=watch, settings=settings)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("level", [None, "z1", "z2", "z3"])
def test_ranks_hold_their_part_only(world, size, level):
    extra = ["--bf16", *(("--zero-level", level) if level else ())]
    rank = level and int(level[1])
    for result in world(size)(train_llama, extra, held_bytes):
        for held in result["watched"]:
            numel = held["numel"]
            assert held["param"] * (size if rank == 3 else 1) == 2 * numel
            assert held["grad"] * (size if rank and rank >= 2 else 1) == 4 * numel
            assert held["masters"] * (size if rank else 1) == 4 * numel
            assert held["moments"] * (size if rank else 1) == 8 * numel
            assert held["now"] == 0  # between steps nothing sharded exists in full
        if rank == 3:  # the root's buckets (the first and the last one) and one layer; gradients of one bucket
            buckets = held["buckets"]
            in_full = 2 * (buckets[0] + buckets[-1]) + 2 * max(buckets[1:-1])
            assert held["most"] == in_full and held["most_backward"] <= in_full + 4 * max(buckets)


# ---- accumulation, residence, recomputation ----------------------------------------------------------------------------


def test_accumulation_over_micro_batches(world):
    """z2 and z3 reduce each micro-batch; with allreduce_after_grad_accumulation they have the bits of plain training."""
    once, plain = {"allreduce_after_grad_accumulation": True}, curves(world, 2, micro_batch_size=1)
    for level in ("z2", "z3"):
        found = curves(world, 2, LEVELS[level], micro_batch_size=1)
        assert_close(found, plain, 1e-5)
        assert_bit_equal(found, curves(world, 2, LEVELS["z2"], micro_batch_size=1))
        assert_bit_equal(curves(world, 2, LEVELS[level], once, micro_batch_size=1), plain)


def test_overlap_with_accumulation_changes_no_bit(world):
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "5000")
    for level in ("z1", "z2", "z3"):
        assert_bit_equal(
            curves(world, 2, (*LEVELS[level], *overlap), micro_batch_size=1),
            curves(world, 2, LEVELS[level], micro_batch_size=1),
        )


@pytest.mark.parametrize("settings", [{"param_resident": True}, {"cpu_offload": True}])
def test_residence_and_offload_change_no_bit(world, settings):
    assert_bit_equal(curves(world, 2, LEVELS["z3"], settings), curves(world, 2))


@pytest.mark.parametrize(
    "flags",
    [
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2"),
        ("--overlap-param-gather",),
    ],
)
def test_recomputation_with_sharded_parameters(world, flags):
    extra = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3")
    assert_bit_equal(curves(world, 2, (*LEVELS["z3"], *extra, *(flags if len(flags) == 1 else ()))), curves(world, 2))
    if len(flags) > 1:
        assert_bit_equal(curves(world, 2, (*LEVELS["z3"], *flags)), curves(world, 2))


def test_clipping_within_rounding(world):
    for level in ("z1", "z3"):
        assert_close(curves(world, 2, LEVELS[level], clip="1.0"), curves(world, 2, clip="1.0"), 1e-7)


# ---- norms -------------------------------------------------------------------------------------------------------------


def ones_in_gradients(step, number):
    """Watch: norm and number of zeros if every gradient were one (and its first element zero)."""
    from mindspeed_ms.core import storage

    found = []
    for first in (1.0, 0.0):
        for shard in step.optimizer.shards:
            for piece in shard.pieces:
                grad = shard.slice_grad(piece.start, piece.stop)
                values = np.ones(grad.size, np.float32)
                if piece.offset == 0:
                    values[0] = first
                storage.write(grad, storage.from_array(values))
        found += [step.optimizer.statistics.norm(), step.optimizer.statistics.num_zeros()]
    step.optimizer.zero_grad()
    return found


LAYOUTS = {
    "one": (1, ()),
    "dp2": (2, ()),
    "dp2z1": (2, LEVELS["z1"]),
    "dp2z2": (2, LEVELS["z2"]),
    "dp2z3": (2, LEVELS["z3"]),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "tp2sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "tp2dp2z1": (4, ("--tensor-model-parallel-size", "2", *LEVELS["z1"])),
    "tp2spdp2z3": (4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", *LEVELS["z3"])),
    "pp2dp2z2": (4, ("--pipeline-model-parallel-size", "2", *LEVELS["z2"])),
    "dp4shards2": (4, (*LEVELS["z2"], "--zero-shard-size", "2")),
}


def norm_of_ones(name, extra):
    recording = recordings.load(name)
    batches = {key: values[:0] for key, values in recording.batches.items()}
    return runner.run(recording.flags, ["--micro-batch-size", "1", *extra], batches, watch=ones_in_gradients)["watched"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["single_gpt2", "single_llama"])
def test_norm_of_ones_counts_every_parameter_once(world, name, layout):
    """sqrt(number of parameters), the tied weight (gpt2) once; zeros of padding are not counted."""
    size, flags = LAYOUTS[layout]
    recording = recordings.load(name)
    vocabulary = padded_vocabulary(recording, 2)  # divides by every size here
    number, tensors = _parameters(name) if vocabulary == 128 else (None, None)
    for norm, zeros, norm_without, zeros_found in world(size)(norm_of_ones, name, [*flags, "--padded-vocab-size", "128"]):
        assert zeros == 0
        assert norm == pytest.approx(math.sqrt(number), rel=1e-12)
        held = 2 if "--tensor-model-parallel-size" in flags else 1
        assert number - norm_without**2 == pytest.approx(zeros_found, abs=1e-6)
        assert tensors <= zeros_found <= held * tensors


def _parameters(name):
    """(elements, tensors) of the recorded model."""
    hidden, layers, vocabulary, length = 64, 4, 128, 32
    if name == "single_gpt2":
        layer = [
            3 * hidden * hidden,
            3 * hidden,
            hidden * hidden,
            hidden,
            128 * hidden,
            128,
            128 * hidden,
            hidden,
            *[hidden] * 4,
        ]
        rest = [vocabulary * hidden, length * hidden, hidden, hidden]
    else:
        layer = [(hidden + 2 * 32) * hidden, hidden * hidden, 2 * 176 * hidden, 176 * hidden, hidden, hidden]
        rest = [vocabulary * hidden, vocabulary * hidden, hidden]
    return layers * sum(layer) + sum(rest), layers * len(layer) + len(rest)


# ---- a step without gradients ------------------------------------------------------------------------------------------


def zero_gradients(step, number):
    """Watch: the loss that is differentiated is multiplied by zero; the weights before each step."""
    from mindspeed_ms.training.checkpointing import whole_parameters

    if number == 0:
        runner.multiply_differentiated_loss(step, lambda: 0.0)
    step.optimizer.param_groups[0].update(lr=0.01)
    step.optimizer.param_groups[1].update(lr=0.01)
    with whole_parameters(step.model):
        return {name: runner._float32(param).copy() for name, param in runner._parameters(step.model)}


@pytest.mark.parametrize("level", LEVELS)
def test_zero_gradients_decay_matrices_only(world, level):
    for result in world(2)(train_llama, LEVELS[level], zero_gradients, 1):
        before, after = result["watched"]
        for name, array in before.items():
            factor = 1.0 if array.ndim == 1 else 1 - 0.01 * 0.1
            np.testing.assert_allclose(after[name], array * factor, rtol=2e-7, err_msg=name)
        assert result["grad_norm"] == [0.0]


# ---- checkpoints -------------------------------------------------------------------------------------------------------

BATCHES = [tiny.samples(4, seed) for seed in range(6)]


def in_two_pieces(folder, level):
    settings = {"parallel": {"zero_level": level}, "training": {"training_iters": 6, "resume_training": True}}
    run_pretrain(folder, BATCHES, {**settings, "training": {**settings["training"], "exit_interval": 3}})
    return run_pretrain(folder, BATCHES, settings)


def in_one_piece(folder, level):
    return run_pretrain(folder, BATCHES, {"parallel": {"zero_level": level}, "training": {"training_iters": 6}})


@pytest.mark.parametrize("level", ["z1", "z2", "z3"])
def test_resuming_is_bit_equal(world, tmp_path, level):
    expected = world(2)(in_one_piece, tmp_path / "whole", level)
    for found, wanted in zip(world(2)(in_two_pieces, tmp_path / "parts", level), expected):
        assert found[0][-3:] == wanted[0][-3:]
        assert all(np.array_equal(found[2][name], value) for name, value in wanted[2].items())
