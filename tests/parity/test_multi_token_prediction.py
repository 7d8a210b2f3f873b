"""Multi-token prediction of several depths: each layout gives the losses, gradient norms and gradients of one rank."""

import functools

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import LAYOUTS

STEPS = 2
UNTIED = "--untie-embeddings-and-output-weights"
TWO = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.4")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
# flags, without which flags of the recording, layouts
CASES = {
    "tied, fused gradients": ((), (UNTIED, "--no-gradient-accumulation-fusion"), ("tp2sp", "pp2", "pp2vpp2", "dp2z3")),
    "own head, fused gradients": ((), ("--no-gradient-accumulation-fusion",), ("tp2", "pp2", "dp2")),
    "per token": (("--calculate-per-token-loss",), (), ("tp2sp", "dp2", "pp2")),
    "recompute": (FULL, (), ("tp2sp", "pp2")),
    "chunks of logits": (("--loss-chunk-size", "8"), (), ("tp2sp",)),
}


@functools.cache
def recording():
    return recordings.load("single_llama")


def run(world, flags, layout, without=(), loss_mask=None, settings=None, keep=("gradients",)):
    batches = {name: values[:STEPS] for name, values in recording().batches.items()}
    if loss_mask is not None:
        batches["loss_mask"] = loss_mask(batches["loss_mask"])
    recorded = [flag for flag in recording().flags if flag not in without]
    extra = [*TWO, *flags, *layout.flags, "--padded-vocab-size", "128"]
    results = world(layout.world)(runner.run, recorded, extra, batches, None, keep, settings)
    return results, runner.joined(results, "gradients")


def some_masked(mask):
    """A loss mask with another number of tokens in each sample."""
    mask = mask.copy()
    for row in range(mask.shape[1]):
        mask[:, row, : 3 * row] = 0
    return mask


def assert_equal(found, expected, name):
    """Losses of all kinds and gradient norms within 1e-5, each gradient within 2e-5 of its norm."""
    (results, gradients), (one, whole) = found, expected
    for result in results:
        for losses, alone in zip(result["losses"], one[0]["losses"]):
            assert losses == pytest.approx(alone, rel=1e-5), name
        np.testing.assert_allclose(result["grad_norm"], one[0]["grad_norm"], rtol=1e-5, err_msg=name)
    assert gradients.keys() == whole.keys()
    for parameter, value in whole.items():
        error = np.linalg.norm(gradients[parameter] - value) / np.linalg.norm(value)
        assert error < 2e-5, f"{name}: gradient of {parameter}: {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_rank(world, case):
    """Each depth has its own loss in the report; all layouts have one curve."""
    flags, without, layouts = CASES[case]
    mask = some_masked if case == "per token" else None
    one = run(world, flags, LAYOUTS["tp1"], without, mask)
    assert {"mtp_1 loss", "mtp_2 loss"} <= one[0][0]["losses"][0].keys()
    for name in layouts:
        assert_equal(run(world, flags, LAYOUTS[name], without, mask), one, name)


@pytest.mark.parametrize("flags", [FULL, ("--loss-chunk-size", "8")], ids=["recompute", "chunks"])
def test_equals_the_plain_way(world, flags):
    """Recomputation and chunks of logits change no loss and no gradient; gradients that are added while made neither."""
    plain = run(world, (), LAYOUTS["tp1"])
    changed = run(world, flags, LAYOUTS["tp1"])
    assert_equal(changed, plain, flags[0])
    assert changed[0][0]["recomputed"] == (STEPS * 2 * (4 + 2) if flags is FULL else 0)  # micro-batches, layers of both kinds
    assert_equal(run(world, (), LAYOUTS["tp1"], ("--no-gradient-accumulation-fusion",)), plain, "fused")


def test_micro_batch_split_does_not_matter_per_token(world):
    """With per-token loss the further losses weigh tokens as the main one does, however the global batch is cut."""
    flags = ("--calculate-per-token-loss",)
    whole, split = (
        run(world, (*flags, "--micro-batch-size", size), LAYOUTS["tp1"], loss_mask=some_masked)[0][0] for size in ("4", "1")
    )
    np.testing.assert_allclose(split["loss"], whole["loss"], rtol=1e-5)
    np.testing.assert_allclose(split["grad_norm"], whole["grad_norm"], rtol=1e-5)
