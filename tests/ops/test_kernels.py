"""Elementary functions of the kernels, and their compilation."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.compiler import kernel
from mindspeed_ms.ops.cpu.kernels.math import exp, normal_distribution, row_maximum, sigmoid


@kernel
def _functions(start, stop, x, y):
    for i in range(start, stop):
        y[0, i] = exp(x[i])
        y[1, i] = sigmoid(x[i])
        y[2, i], y[3, i] = normal_distribution(x[i])


def _evaluate(x):
    x = np.asarray(x, np.float32)
    y = np.empty((4, x.size), np.float32)
    threads.run(_functions, x.size, 0, x, y)
    return y


def test_functions_are_accurate_to_float32():
    x = np.concatenate([np.linspace(-87, 88, 200001), np.linspace(-8, 8, 200001), [0.0, -0.0, 1e-30, -1e-30, 1.5, -1.5]])
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    y = _evaluate(x)
    phi = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in exact])
    assert np.abs(y[0] / np.exp(exact) - 1).max() < 1.5e-7
    assert np.abs(y[1] - 1 / (1 + np.exp(-exact))).max() < 1.5e-7
    assert np.abs(y[2] - phi).max() < 1e-7
    near = np.abs(exact) < 5
    assert np.abs(y[2, near] / phi[near] - 1).max() < 2e-6
    assert np.abs(y[3] - np.exp(-(exact**2) / 2) / math.sqrt(2 * math.pi)).max() < 1e-7


def test_functions_at_the_ends():
    y = _evaluate([np.nan, np.inf, -np.inf, 200.0, -200.0])
    assert np.isnan(y[:, 0]).all()
    assert (y[0, [2, 4]] == 0).all() and (y[0, [1, 3]] > 1e38).all()
    assert np.abs(y[1:3, 1:] - [1, 0, 1, 0]).max() < 1e-37


@kernel
def _maximum(start, stop, x, y):
    for i in range(start, stop):
        y[i] = row_maximum(x[i])


def test_row_maximum_keeps_nan():
    rows = np.array([[1, 5, 3], [-1, -5, -3], [0.0, -0.0, -1], [-np.inf, -np.inf, -np.inf], [1, np.nan, 2]], np.float32)
    y = np.empty(5, np.float32)
    threads.run(_maximum, 5, 0, rows, y)
    assert (y[:4] == [5, -1, 0, -np.inf]).all() and np.isnan(y[4])


_PROGRAM = """
import numpy as np
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.kernels.optimizer import scale
values = np.ones(10, np.float32)
threads.run(scale, 10, 0, values, 2.0)
assert (values == 2).all()
print(sum(scale._entry.stats.cache_hits.values()), sum(scale._entry.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_machine_code(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "new"), "MINDSPEED_MS_DEVICE": "CPU"}
    outputs = [
        subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [output.split()[-2:] for output in outputs] == [["0", "1"], ["1", "0"]]


@kernel
def _count(start, stop, x, y):
    for i in range(start, stop):
        y[i] += x[i]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 64, 1001])
def test_every_piece_is_taken_once(total, monkeypatch):
    """By starter and helpers, from both ends; what is announced to be read soon may be anywhere."""
    monkeypatch.setattr(threads, "_threads", 3)
    x, y = np.ones(total, np.float32), np.zeros(total, np.float32)
    for round_ in range(200):
        threads.reads_weight(8 + round_ % 3, 1 << 20)
        threads.run(_count, total, total * threads.MINIMUM_WORK, x, y)
    assert (y == 200).all()


def test_the_weight_that_followed_is_announced(monkeypatch):
    announced = []
    monkeypatch.setattr(threads, "_weight_after", {})
    monkeypatch.setattr(threads.jobs, "announce", lambda board, *place: announced.append(place))
    for address in (1, 2, 3, 1, 2, 4, 1, 2, 3):
        threads.reads_weight(address, 10 * address)
    assert announced == [(2, 20), (3, 30), (2, 20), (4, 40), (1, 10)]
