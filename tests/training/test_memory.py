"""Host memory of a training step on CPU: nothing is left behind by steps that are done."""

from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.memory import resident_bytes
from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

WARM_UP, STEPS = 150, 100
LIMIT = 2048
"""Bytes per step of 2 micro-batches; a sum by MindSpore in each leaves 4,000."""


def growth(fields, parallel):
    """Bytes by which this process grows per step."""
    all_config = job.make_config({**fields, "num_layers": 2}, parallel, dataset={"global_batch_size": 2})
    _, _, step = job.build(all_config)
    rows, data, before = all_config.dataset_config.batch_size, job.batches(1, rows=2), 0
    for number in range(1, WARM_UP + STEPS + 1):
        step(micro_batches(local_batch(data, 0, rows), rows), number)
        if number == WARM_UP:
            before = resident_bytes()
    return (resident_bytes() - before) / STEPS


def test_a_step_leaves_no_memory_behind(world):
    (found,) = world(1)(growth, job.UNTIED, {})
    assert found < LIMIT, found
