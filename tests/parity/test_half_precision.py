"""bf16 and fp16 trainings: the recorded Megatron run in bf16, weights as rounded masters, overflows."""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import padded_vocabulary

NAME = "curve_llama_bf16_tp2dp2_distopt"


def _flags(recording, precision=("--bf16",), without=()):
    flags = [flag for flag in recording.flags if flag not in ("--bf16", *without)]
    return [*flags, *precision], ["--padded-vocab-size", str(padded_vocabulary(recording, 2))]


def _without_tensor_parallelism(flags):
    position = flags.index("--tensor-model-parallel-size")
    return flags[:position] + flags[position + 2 :]


def bfloat16_steps(step, number):
    """Watch: after each update every weight is bf16 of its master; borders of layers are bf16."""
    import mindspore as ms

    from mindspeed_ms.training.checkpointing import whole_parameters

    (chunk,) = step.model
    layers = chunk.module.language_model.encoder.layers
    if number == 0:
        step.border_dtypes = set()
        for layer in layers:
            layer.register_forward_hook(lambda _cell, _args, output: step.border_dtypes.add(str(output.dtype)))
    masters = runner.whole_states(step.optimizer)
    with whole_parameters(step.model):
        named = [pair for chunk in step.model for pair in chunk.module.parameters_and_names()]
        weights = {name: runner._float32(param) for name, param in named if param.dtype == ms.bfloat16}
    assert set(weights) == set(masters)
    equal = [np.array_equal(weights[name], to_bfloat16(masters[name]["fp32_param"])) for name in weights]
    differs = any(not np.array_equal(weights[name], masters[name]["fp32_param"]) for name in weights)
    return all(equal), differs, sorted(step.border_dtypes)


def to_bfloat16(array):
    """float32 values rounded to bfloat16, to nearest even."""
    bits = np.asarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_bf16_follows_megatron(world):
    """Losses within 5e-4 of Megatron's, not those of fp32; the norm within 1 %; weights bf16(master) bit for bit."""
    recording = recordings.load(NAME)
    results = world(4)(runner.run, *_flags(recording), recording.batches, watch=bfloat16_steps)
    plain = world(4)(runner.run, *_flags(recording, ()), recording.batches)[0]
    for result in results:
        loss, norm = np.array(result["loss"]), np.array(result["grad_norm"])
        assert np.abs(loss / recording.figures["loss"] - 1).max() < 5e-4
        assert np.abs(norm / recording.figures["grad_norm"] - 1).max() < 1e-2
        np.testing.assert_allclose(result["lr"], recording.figures["lr"], rtol=1e-12, atol=1e-15)
        assert np.all(loss != np.array(plain["loss"]))
        assert all(equal for equal, _, _ in result["watched"])
        assert result["watched"][-1][1:] == (True, ["BFloat16"])


def grad_dtypes(step, number):
    """Watch: dtypes of the gradient buffers."""
    return {str(buffer.grad_dtype) for chunk in step.model for buffer in chunk.buffers}


def test_gradients_reduced_in_bf16(world):
    """--grad-reduce-in-bf16: buffers of bf16, and still near Megatron's curve."""
    recording = recordings.load(NAME)
    flags, extra = _flags(recording, ("--bf16", "--grad-reduce-in-bf16"))
    result = world(4)(runner.run, flags, extra, recording.batches, watch=grad_dtypes)[0]
    assert result["watched"][0] == {"BFloat16"}
    assert np.abs(np.array(result["loss"]) / recording.figures["loss"] - 1).max() < 2e-3


LEVELS = {
    "plain": (),
    "distopt": ("--use-distributed-optimizer",),
    "z2": ("--zero-level", "z2"),
    "z3": ("--zero-level", "z3", "--overlap-grad-reduce", "--overlap-param-gather"),
}


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("level", ["distopt", "z2", "z3"])
def test_levels_are_bit_equal_in_half_precision(world, precision, level):
    recording = recordings.load(NAME)
    batches = {name: values[:4] for name, values in recording.batches.items()}
    runs = []
    for name in ("plain", level):
        options = (precision, "--initial-loss-scale", "1024", "--clip-grad", "0.0", *LEVELS[name])
        flags, extra = _flags(
            recording, options if precision == "--fp16" else (precision, *options[3:]), ("--use-distributed-optimizer",)
        )
        runs.append(world(2)(runner.run, _without_tensor_parallelism(flags), extra, batches, None, ("weights",))[0])
    assert runs[0]["loss"] == runs[1]["loss"] and all(runs[0]["success"])
    for name, (_, array) in runs[0]["weights"].items():
        assert np.array_equal(array, runs[1]["weights"][name][1]), name


OVERFLOWS = range(1, 6)


def inject_overflow(step, number):
    """Watch: on rank 1 the backward of some steps starts from infinity; gives weights, moments and rate before the step."""
    from mindspeed_ms.core import comm

    if number == 0:
        step.number = -1
        runner.multiply_differentiated_loss(
            step, lambda: float("inf") if comm.get_rank() == 1 and step.number in OVERFLOWS else 1.0
        )
    step.number = number
    states = runner.whole_states(step.optimizer)
    return (
        {(name, kind): array for name, kinds in states.items() for kind, array in kinds.items()},
        step.optimizer.param_groups[0]["lr"],
        step.optimizer.update.step_count,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_on_one_rank(world, level):
    """All ranks skip; the scale halves once hysteresis is used up and stops at its minimum; training goes on."""
    recording = recordings.load(NAME)
    flags, extra = _flags(
        recording,
        (
            "--fp16",
            "--initial-loss-scale",
            "4",
            "--min-loss-scale",
            "1",
            "--hysteresis",
            "2",
            "--loss-scale-window",
            "3",
            *LEVELS[level],
        ),
        ("--use-distributed-optimizer",),
    )
    batches = {name: values[:10] for name, values in recording.batches.items()}
    for result in world(2)(runner.run, _without_tensor_parallelism(flags), extra, batches, watch=inject_overflow):
        assert result["success"] == [number not in OVERFLOWS for number in range(10)]
        assert result["loss_scale"] == [4.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
        for number in OVERFLOWS:
            (before, *others), (after, *others_after) = result["watched"][number : number + 2]
            assert others == others_after and all(np.array_equal(before[key], after[key]) for key in before)
        assert result["watched"][-1][2] == 5 and np.all(np.isfinite(result["loss"]))
        assert result["loss"][-1] < result["loss"][0]


EXPERTS = {
    "ep2": ("--expert-model-parallel-size", "2"),
    "ep2 grouped, distopt": ("--expert-model-parallel-size", "2", "--moe-grouped-gemm", "--use-distributed-optimizer"),
}


def _run_experts(world, options, watch=None):
    recording = recordings.load("single_mixtral")
    batches = {name: values[:5] for name, values in recording.batches.items()}
    extra = ["--padded-vocab-size", "128", "--initial-loss-scale", "1024", "--hysteresis", "1", *options]
    return world(2)(runner.run, recording.flags, extra, batches, watch=watch)


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_in_half_precision(world, precision, layout):
    """Losses of all kinds and norms stay near those of float32; the loss scale is the one that was set."""
    plain = _run_experts(world, EXPERTS[layout])[0]
    for result in _run_experts(world, (*EXPERTS[layout], precision)):
        assert all(result["success"]) and result["loss_scale"] == [1024.0 if precision == "--fp16" else 1.0] * 5
        for losses, expected in zip(result["losses"], plain["losses"]):
            assert losses == pytest.approx(expected, rel=2e-2)
        np.testing.assert_allclose(result["loss"], plain["loss"], rtol=5e-3)
        np.testing.assert_allclose(result["grad_norm"], plain["grad_norm"], rtol=5e-2)
        assert result["loss"] != plain["loss"]


def overflow_of_an_expert(step, number):
    """Watch: in step 1 the gradient of one expert's weight is infinite on rank 1 alone; gives an expert's weight."""
    from mindspeed_ms.core import comm, storage

    experts = [p for chunk in step.model for name, p in chunk.module.parameters_and_names() if ".experts." in name]
    if number == 1:
        original = step.optimizer.step

        def changed():
            step.optimizer.step = original
            if comm.get_rank() == 1:
                storage.write(experts[-1].main_grad, experts[-1].main_grad + np.inf)
            return original()

        step.optimizer.step = changed
    return runner._float32(experts[0]).copy()


@pytest.mark.parametrize("layout", EXPERTS)
def test_overflow_of_one_expert_stops_every_rank(world, layout):
    """No other rank holds this expert: all skip the step, and the loss scale halves everywhere."""
    for result in _run_experts(world, (*EXPERTS[layout], "--fp16"), overflow_of_an_expert):
        assert result["success"] == [True, False, True, True, True]
        assert result["loss_scale"] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert np.array_equal(*result["watched"][1:3]) and not np.array_equal(*result["watched"][2:4])
