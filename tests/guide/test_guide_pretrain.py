"""The guide's script from its first line to its last, with its own model and with the packaged one."""

import json
import sys
from unittest import mock

import numpy as np
import pytest

from tests.guide import guide_pretrain

ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 "
    "--max-position-embeddings 16 --padded-vocab-size 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 10 "
    "--lr 1e-2 --position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 --seed 11 "
    "--log-interval 1 --pangu-only 4 --tensor-model-parallel-size 2 --sequence-parallel"
).split()


def train(argv, source):
    """In a rank: the guide's script from a fresh state."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.training.initialize import unset_global_variables

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    unset_global_variables()
    try:
        with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]):
            return guide_pretrain.train(source)
    finally:
        unset_global_variables()


def _losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["lm loss"] if "lm loss" in line else line["loss"] for line in lines if "grad_norm" in line]


@pytest.mark.parametrize("tied", [True, False])
def test_guide_script_equals_packaged_model(world, tmp_path, tied):
    """Both models start from the same weights, see the same batches and end with the same weights."""
    argv = ARGUMENTS if tied else [*ARGUMENTS, "--untie-embeddings-and-output-weights"]
    results, losses = {}, {}
    for source in ("guide", "packaged"):
        folder = tmp_path / source
        results[source] = world(2)(train, [*argv, "--save", str(folder)], source)
        losses[source] = _losses(folder)
    np.testing.assert_allclose(losses["guide"], losses["packaged"], rtol=1e-6)
    assert len(losses["guide"]) == 10 and abs(losses["guide"][0] - np.log(64)) < 0.05
    assert losses["guide"][-1] < losses["guide"][0] - 0.1
    for guide, packaged in zip(results["guide"], results["packaged"]):
        assert set(guide) == set(packaged)
        for name, (_, array) in guide.items():
            np.testing.assert_allclose(array, packaged[name][1], rtol=0, atol=1e-6, err_msg=name)
