"""Sequences cut over ranks in every way: losses, gradient norms and each gradient equal those of whole sequences."""

import functools

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import padded_vocabulary

STEPS = 2
RING, ULYSSES, HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
MODELS = ("gpt2", "llama", "qwen")
TP2SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")


def _cut(size, algorithm, degree=None):
    flags = ["--context-parallel-size", str(size), "--context-parallel-algo", algorithm]
    return [*flags, "--ulysses-degree-in-cp", str(degree)] if degree else flags


CUTS = {
    "ring2": _cut(2, RING),
    "ring4": _cut(4, RING),
    "ring8": _cut(8, RING),
    "ulysses2": _cut(2, ULYSSES),
    "ulysses4": _cut(4, ULYSSES),
    "hybrid2x2": _cut(4, HYBRID, 2),
    "hybrid2x4": _cut(8, HYBRID, 2),
}
BESIDES = {
    "tp2sp": (TP2SP, 2),
    "tp2": (TP2SP[:2], 2),
    "pp2": (PP2, 2),
    "pp2vpp2": ((*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), 2),
    "dp2": ((), 2),
    "dp2z3": (("--zero-level", "z3"), 2),
    "z1": (("--use-distributed-optimizer", "--overlap-grad-reduce"), 1),
    "full": (("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"), 1),
    "selective": (("--recompute-granularity", "selective"), 1),
    "window": (("--window-size", "11,0"), 1),
    "window_some": (("--window-size", "5,0", "--window-attn-skip-freq", "2"), 1),
    "flash": (("--use-flash-attn",), 1),
    "chunks": (("--zero-level", "z3", "--loss-chunk-size", "5", "--mlp-chunk-size", "7"), 2),
    "per_token": (("--calculate-per-token-loss",), 1),
    "per_token_dp2": (("--calculate-per-token-loss",), 2),
    "tp2sp_pp2": ((*TP2SP, *PP2), 4),
}
CHANGES_NUMBERS = ("window", "window_some", "per_token", "per_token_dp2")
"""Options that one rank must have too, to compare with."""


def _run(world, model, size, flags, batches=None):
    recording = recordings.load(f"single_{model}")
    weights = runner.our_arrays(recording.arrays("w0")) if recording.path is not None else None
    batches = batches or {name: values[:STEPS] for name, values in recording.batches.items()}
    extra = ["--padded-vocab-size", str(padded_vocabulary(recording, 2)), *flags]
    return world(size)(runner.run, recording.flags, extra, batches, weights, ("gradients",))


@functools.lru_cache(maxsize=8)
def _reference(world, model, flags):
    results = _run(world, model, 1, flags)
    return results[0], runner.joined(results, "gradients")


def _assert_equal(results, expected, gradients, tolerance=1e-5):
    for result in results:
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=tolerance)
        np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=tolerance)
    found = runner.joined(results, "gradients")
    assert set(found) == set(gradients)
    whole = np.sqrt(sum(float((values.astype(np.float64) ** 2).sum()) for values in gradients.values()))
    for name, values in gradients.items():
        size = max(np.linalg.norm(values), 1e-5 * whole)  # a bias of keys has no true gradient
        assert np.linalg.norm(found[name] - values) < tolerance * size, name


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_whole_sequences(world, model, cut):
    results = _run(world, model, int(CUTS[cut][1]), CUTS[cut])
    _assert_equal(results, *_reference(world, model, ()))


@pytest.mark.parametrize("cut", ("ring2", "ulysses2"))
@pytest.mark.parametrize("beside", BESIDES)
def test_with_other_options(world, beside, cut):
    flags, ranks = BESIDES[beside]
    model = "gpt2" if beside.startswith("pp2vpp2") else "llama"
    results = _run(world, model, 2 * ranks, [*CUTS[cut], *flags])
    _assert_equal(results, *_reference(world, model, flags if beside in CHANGES_NUMBERS else ()))


EP2 = ("--expert-model-parallel-size", "2")
EXPERTS = [("ring2", ()), ("ring2", EP2), ("ulysses2", EP2), ("ring4", EP2), ("hybrid2x2", EP2)]


@pytest.mark.parametrize("cut, flags", EXPERTS)
def test_experts(world, cut, flags):
    """Experts are spread over data and context parallel ranks."""
    _assert_equal(_run(world, "mixtral", int(CUTS[cut][1]), [*CUTS[cut], *flags]), *_reference(world, "mixtral", ()))


@pytest.mark.parametrize("cut", ("ring2", "hybrid2x2"))
@pytest.mark.parametrize("dtype", ("--bf16", "--fp16"))
def test_half_precision(world, dtype, cut):
    """Parts travel in half precision and are merged in float32: within a rounding of whole sequences."""
    flags = (dtype, "--attention-softmax-in-fp32") if dtype == "--bf16" else (dtype, "--initial-loss-scale", "64")
    expected, _ = _reference(world, "llama", flags)
    for result in _run(world, "llama", int(CUTS[cut][1]), [*CUTS[cut], *flags]):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=2e-4)
        np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=1e-2)
