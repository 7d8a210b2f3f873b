"""What the benchmark of long sequences counts, at a small size: bytes sent by the formula, no whole score matrix, memory."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def _benchmark():
    if "long_sequence" not in sys.modules:
        spec = importlib.util.spec_from_file_location("long_sequence", FOLDER / "long_sequence.py")
        sys.modules["long_sequence"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["long_sequence"])
    return sys.modules["long_sequence"]


def count(name, cut, length):
    """A function of the benchmark in a rank."""
    return getattr(_benchmark(), name)(length, _benchmark().CUTS[cut])


@pytest.mark.parametrize("cut", ["ring 2", "ulysses 2", "ring 4", "ulysses 4", "hybrid 2x2"])
def test_bytes_sent_are_those_of_the_formula(world, cut):
    benchmark = _benchmark()
    parallel = benchmark.CUTS[cut]
    found = world(parallel["context_parallel_size"])(count, "sent", cut, 64)
    assert set(found) == {benchmark.expected_bytes(64, parallel)}


@pytest.mark.parametrize("cut", ["ring 2", "hybrid 2x2"])
def test_memory_falls_with_the_ranks(world, cut):
    benchmark = _benchmark()
    ranks = benchmark.CUTS[cut]["context_parallel_size"]
    (one,) = world(1)(count, "memory", "one rank", 2048)
    for result in world(ranks)(count, "memory", cut, 2048):
        assert result["kept"] * ranks <= 1.1 * one["kept"] and result["peak"] * ranks <= 1.15 * one["peak"]
        assert result["largest"] < 2048**2
