"""Host memory of a training step on CPU: nothing is left behind by steps that are done."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd
from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.memory import held_memory
from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

HALF = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"}
CASES = {
    "one-untied": (job.UNTIED, {}),
    "pp2-half": ({**job.UNTIED, **HALF}, {"pipeline_model_parallel_size": 2}),
    "z3": (job.UNTIED, {"zero_level": "z3"}),
}
WARM_UP, INTERVAL, INTERVALS = 45, 15, 5
HEAP_LIMIT, BLOCKS_LIMIT = 200, 10
"""Per step of 2 micro-batches. A cast by MindSpore in each leaves 320 bytes of the heap, and z3's hooks left 350."""


def growth(fields, parallel):
    """[bytes of the C heap, blocks of Python objects] by which this process grows per step: medians over intervals, since
    some things happen once."""
    all_config = job.make_config({**fields, "num_layers": 2}, parallel, dataset={"global_batch_size": 2})
    _, _, step = job.build(all_config)
    rows, data = all_config.dataset_config.batch_size, job.batches(1, rows=2)
    held = []
    for number in range(WARM_UP + INTERVALS * INTERVAL + 1):
        step(micro_batches(local_batch(data, 0, rows), rows), number + 1)
        if number >= WARM_UP and (number - WARM_UP) % INTERVAL == 0:
            held.append(held_memory())
    return np.median(np.diff(held, axis=0), axis=0) / INTERVAL


@pytest.mark.parametrize("name", CASES)
def test_a_step_leaves_no_memory_behind(world, name):
    fields, parallel = CASES[name]
    for heap, blocks in world(2 if parallel else 1)(growth, fields, parallel):
        assert heap < HEAP_LIMIT, heap
        assert blocks < BLOCKS_LIMIT, blocks


def _operators():
    """Bytes of the heap that one call of each operator leaves."""
    random = np.random.default_rng(0)
    a, b, deep = (Tensor(random.normal(size=size).astype(np.float32)) for size in ((2, 4, 4), (2, 4, 4), (4, 4096)))
    weight, bias = (
        autograd.set_requires_grad(Tensor(random.normal(size=size).astype(np.float32))) for size in ((4096, 4), (4,))
    )
    ids = Tensor(random.integers(0, 4, (2, 8)).astype(np.int32))
    calls = {
        "product": lambda: ops.matmul(a, b),
        "transposed": lambda: ops.matmul(a, b, True, True),
        "deep": lambda: ops.linear_input_grad(deep, weight),
        "bias": lambda: autograd.grad(ops.add_bias(a, bias), bias, b),
        "casts": lambda: ops.cast(ops.cast(a, ms.bfloat16), ms.float32),
        "documents": lambda: ops.document_mask(ids, 0),
        "joins": lambda: ops.cat((ops.total(a).reshape(1), ops.is_zero(a).reshape(-1))),
    }
    kept = {}
    for name, call in calls.items():
        for count in (100, 200):
            before = held_memory()[0]
            for _ in range(count):
                call()
        kept[name] = (held_memory()[0] - before) / count
    return kept


def test_operators_leave_no_memory_behind(world):
    (kept,) = world(1)(_operators)
    assert max(kept.values()) < 100, kept  # a scalar argument of a MindSpore operator leaves 160
