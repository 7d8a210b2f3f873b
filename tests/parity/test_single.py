"""Recorded single-process runs of Megatron-LM against this package, in every layout.

Loss within 1e-5 relative per step, gradient norm within 1e-5, each gradient of step 0 within 1e-5 of its norm; final
weights within 1e-3 of the distance that training moved them, moments within 1e-4. The key third of qkv biases has no true
gradient (softmax ignores a shift), so Adam turns its rounding noise into steps: there 1e-3 absolute.
"""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import LAYOUTS, layouts_of, padded_vocabulary, tensor_parallel_limit

SINGLE = recordings.available("single_")


def _cases(fits):
    for name in SINGLE:
        limit = tensor_parallel_limit(recordings.load(name))
        for layout in layouts_of(name):
            if (layout.tensor_parallel_size <= limit) == fits:
                yield pytest.param(name, layout, id=f"{name}-{layout.name}")


def _vocabulary_flags(recording, layout):
    return ["--padded-vocab-size", str(padded_vocabulary(recording, layout.tensor_parallel_size))]


def _run(world, recording, layout, keep=(), extra=()):
    weights = runner.our_arrays(recording.arrays("w0")) if recording.path is not None else None
    return world(layout.world)(
        runner.run,
        recording.flags,
        [*layout.flags, *_vocabulary_flags(recording, layout), *extra],
        recording.batches,
        weights,
        tuple(keep),
    )


def _relative(actual, expected):
    return np.abs(np.array(actual) / np.array(expected) - 1).max()


def _check_curves(results, figures):
    for result in results:  # every rank knows the same numbers
        assert _relative(result["loss"], figures["loss"]) < 1e-5
        assert _relative(result["grad_norm"], figures["grad_norm"]) < 1e-5
        np.testing.assert_allclose(result["lr"], figures["lr"], rtol=1e-12, atol=1e-15)


def _without_key_biases(name, array, recording):
    """(the part of an array that has a true gradient, the keys' biases or None)."""
    if not name.endswith("attention.qkv_proj.bias"):
        return array, None
    heads = int(recording.flag("--num-attention-heads"))
    groups = tensor_parallel_limit(recording)
    per_group = array.reshape(groups, heads // groups + 2, -1)
    return np.delete(per_group, -2, axis=1), per_group[:, -2]


@pytest.mark.parametrize("name, layout", list(_cases(fits=True)))
def test_equals_megatron(world, name, layout):
    """The whole training of a recording, in one layout."""
    recording = recordings.load(name)
    keep = ("gradients", "weights", "moments") if recording.path is not None else ()
    results = _run(world, recording, layout, keep)
    _check_curves(results, recording.figures)
    _check_balance_losses(results, recording)
    if keep:
        _check_gradients(results, recording)
        _check_weights(results, recording)
        _check_moments(results, recording)


def _check_balance_losses(results, recording):
    """Megatron's tracker sums each layer's loss over the micro-batches; ours is the mean over both."""
    if "--num-experts" not in recording.flags or recording.path is None:
        return
    with np.load(recording.path) as data:
        recorded = data["moe_aux_loss_sum_over_mb"]
    micro_batches = int(recording.flag("--global-batch-size")) // int(recording.flag("--micro-batch-size"))
    for result in results:
        ours = [losses["load_balancing_loss"] for losses in result["losses"]]
        np.testing.assert_allclose(ours, recorded.mean(axis=1) / micro_batches, rtol=1e-5)


def _check_gradients(results, recording):
    ours = runner.joined(results, "gradients")
    recorded = runner.our_arrays(recording.arrays("grad0"))
    assert set(ours) == set(recorded)
    for name, expected in recorded.items():
        actual, _ = _without_key_biases(name, ours[name], recording)
        expected, _ = _without_key_biases(name, expected, recording)
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 1e-5, f"gradient of {name}: {error:.2e}"


def _check_weights(results, recording):
    ours = {name: array for name, array in runner.joined(results, "weights").items() if not name.endswith("expert_bias")}
    first, last = (runner.our_arrays(recording.arrays(kind)) for kind in ("w0", "wN"))
    assert set(ours) == set(last)
    for name, expected in last.items():
        moved = np.linalg.norm(expected - first[name])
        actual, actual_keys = _without_key_biases(name, ours[name], recording)
        expected, expected_keys = _without_key_biases(name, expected, recording)
        error = np.linalg.norm(actual - expected)
        assert error <= 1e-3 * moved, f"{name} after training: {error:.2e}, moved {moved:.2e}"
        if expected_keys is not None:
            np.testing.assert_allclose(actual_keys, expected_keys, rtol=0, atol=1e-3)


def _check_moments(results, recording):
    for recorded_kind, kind in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        ours = runner.joined(results, kind)
        for name, expected in runner.our_arrays(recording.arrays(recorded_kind)).items():
            actual, _ = _without_key_biases(name, ours[name], recording)
            expected, _ = _without_key_biases(name, expected, recording)
            error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
            assert error < 1e-4, f"{kind} of {name}: {error:.2e}"


@pytest.mark.parametrize("name, layout", list(_cases(fits=False)))
def test_a_layout_that_cannot_be_is_refused(name, layout):
    """More tensor-parallel ranks than key/value groups: an error that names the groups, before anything is built."""
    from mindspeed_ms.config import ConfigError

    recording = recordings.load(name)
    with pytest.raises(ConfigError, match=r"num_query_groups|num-query-groups"):
        config = runner.config_of(recording.flags, [*layout.flags, *_vocabulary_flags(recording, layout)])
        config.check(world_size=layout.world)


@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "tp2dp2"])
def test_twice_is_bit_equal(world, layout):
    """The same configuration gives the same bits."""
    recording = recordings.load("single_llama")
    first, second = (_run(world, recording, LAYOUTS[layout], ("weights",)) for _ in range(2))
    for one, other in zip(first, second):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
        for name, (_, array) in one["weights"].items():
            assert np.array_equal(array, other["weights"][name][1]), name


@pytest.mark.parametrize("name", ["single_gpt2", "single_llama"])
def test_micro_batch_split_does_not_matter_per_token(world, name):
    """With per-token loss the curve is the same however the global batch is cut."""
    recording = recordings.load(name)
    curves = []
    for layout, micro_batch_size in (("tp1", 4), ("tp1", 2), ("tp1", 1), ("dp2", 1), ("dp2", 2)):
        results = _run(
            world, recording, LAYOUTS[layout], extra=["--micro-batch-size", str(micro_batch_size), "--calculate-per-token-loss"]
        )
        curves.append((results[0]["loss"], results[0]["grad_norm"]))
    for loss, norm in curves[1:]:
        assert _relative(loss, curves[0][0]) < 1e-5
        assert _relative(norm, curves[0][1]) < 1e-5
