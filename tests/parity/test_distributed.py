"""Recorded multi-process runs of Megatron-LM: the same flags, on as many ranks, give the same curve."""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import padded_vocabulary

DISTRIBUTED = recordings.available("dist_")


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_equals_megatron(world, name):
    """Loss and gradient norm within 1e-5 per step on every rank."""
    _check(world, name)


@pytest.mark.parametrize("level", ["z2", "z3"])
@pytest.mark.parametrize("name", ["dist_pp2dp2_distopt_gpt2", "dist_tp2dp2_distopt_llama"])
def test_equals_megatron_at_higher_zero_levels(world, name, level):
    """Megatron's distributed optimizer against sharded gradients and parameters, with pipeline and tied embedding."""
    _check(world, name, ("--zero-level", level, "--overlap-grad-reduce", "--overlap-param-gather"))


def _check(world, name, options=()):
    recording = recordings.load(name)
    single = recordings.load(f"single_{recording.variant}")
    size = int(recording.flag("--tensor-model-parallel-size", 1))
    extra = ["--padded-vocab-size", str(padded_vocabulary(recording, size)), *options]
    weights = runner.our_arrays(single.arrays("w0")) if single.path is not None else None
    for result in world(recording.world)(runner.run, recording.flags, extra, single.batches, weights):
        for key in ("loss", "grad_norm"):
            assert np.abs(np.array(result[key]) / recording.figures[key] - 1).max() < 1e-5
        np.testing.assert_allclose(result["lr"], recording.figures["lr"], rtol=1e-12, atol=1e-15)
        assert result["recomputed"] == _recomputed(recording, len(result["loss"]))


def _recomputed(recording, steps):
    """Layers (or their attentions) that a run must compute twice."""
    if "--recompute-granularity" not in recording.flags:
        return 0
    layers, micro_batch, global_batch = (
        int(recording.flag(name)) for name in ("--num-layers", "--micro-batch-size", "--global-batch-size")
    )
    return steps * global_batch // micro_batch * layers
