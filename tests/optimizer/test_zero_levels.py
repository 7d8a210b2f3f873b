"""Sharded optimizer, gradients and parameters (z1, z2, z3) against training with one data-parallel rank, bit for bit."""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner

STEPS = 4


def train(extra, zero_config, micro_batch_size, micro_batches=1, clip="0.0", count=STEPS):
    """Train the recorded llama on its batches; (loss and norm per step, weights, moments)."""
    recording = recordings.load("single_llama")
    flags = [*recording.flags, "--clip-grad", clip, "--micro-batch-size", str(micro_batch_size)]
    batches = {name: values[:count] for name, values in recording.batches.items()}
    result = runner.run(
        flags,
        extra,
        batches,
        None,
        ("weights", "moments"),
        settings={"optimizer_config.zero_config": zero_config} if zero_config else None,
    )
    arrays = {(kind, name): array for kind in ("weights", "exp_avg", "exp_avg_sq") for name, (_, array) in result[kind].items()}
    return result["loss"], result["grad_norm"], arrays


_seen = {}


def curves(world, size, extra=(), zero_config=None, micro_batch_size=None, **options):
    """Result of rank 0, all ranks having the same; remembered."""
    key = repr((size, extra, zero_config, micro_batch_size, options))
    if key not in _seen:
        results = world(size)(train, list(extra), zero_config, micro_batch_size or 4 // size, **options)
        for other in results[1:]:
            assert other[0] == results[0][0] and other[1] == results[0][1]
            assert all(np.array_equal(other[2][name], array) for name, array in results[0][2].items())
        _seen[key] = results[0]
    return _seen[key]


def assert_bit_equal(found, expected):
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    for name, array in expected[2].items():
        assert np.array_equal(found[2][name], array), name


def assert_close(found, expected, tolerance):
    for one, other in zip(found[:2], expected[:2]):
        np.testing.assert_allclose(one, other, rtol=tolerance)
    for name, array in expected[2].items():
        error = np.linalg.norm(found[2][name] - array) / np.linalg.norm(array)
        assert error < 10 * tolerance, f"{name}: {error:.1e}"


LEVELS = {
    "distopt": ("--use-distributed-optimizer",),
    "z1": ("--zero-level", "z1"),
    "z2": ("--zero-level", "z2"),
    "z3": ("--zero-level", "z3"),
}
BUCKETS = {name: ("--ddp-bucket-size", size) for name, size in (("one", "1"), ("some", "20000"), ("huge", "1000000000"))}
OVERLAPS = {"plain": (), "overlap": ("--overlap-grad-reduce", "--overlap-param-gather")}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_equal_plain_data_parallelism(world, size, level):
    """Bit-equal to unsharded training on as many ranks, within 1e-5 of one rank."""
    found = curves(world, size, LEVELS[level])
    assert_bit_equal(found, curves(world, size))
    assert_close(found, curves(world, 1, micro_batch_size=4 // size), 1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_buckets_and_overlap_change_no_bit(world, level, bucket, overlap):
    found = curves(world, 2, (*LEVELS[level], *BUCKETS[bucket], *OVERLAPS[overlap]), count=3)
    assert_bit_equal(found, curves(world, 2, count=3))


@pytest.mark.parametrize("level", ["z1", "z2", "z3"])
def test_shards_in_smaller_groups(world, level):
    """zero_shard_size 2 on four ranks: the same bits at every level, within 1e-5 of one rank."""
    found = curves(world, 4, (*LEVELS[level], "--zero-shard-size", "2"))
    assert_bit_equal(found, curves(world, 4, (*LEVELS["z1"], "--zero-shard-size", "2")))
    assert_close(found, curves(world, 1, micro_batch_size=1), 1e-5)
