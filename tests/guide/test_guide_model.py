"""The guide's own GPTModel, with its private mask enum, equals the packaged one."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job
from tests.model import builders
from tests.model.test_layouts import assert_equal_runs

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STRONG = {"init_method_std": 0.2}
MODELS = {"gpt2": {**builders.GPT2, **STRONG}, "llama": {**builders.LLAMA, **STRONG}}


def run(source, model_fields, parallel, eod):
    """Loss, gradients and logits of the guide's or the packaged model."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.legacy.model.gpt_model import GPTModel as packaged
    from tests.guide.guide_model import GPTModel as guide

    config = builders.make_config(model_fields, **parallel)
    builders.start(config)
    arguments = {} if eod is None else {"eod": eod, "reset_position_ids": True}
    model = builders.make_model(config, guide if source == "guide" else packaged, **arguments)
    data = builders.batch(config)
    if eod is not None:
        data.pop("position_ids")
    data.setdefault("position_ids", None)
    with autograd.no_grad():
        logits = model(data["tokens"], data["position_ids"], None, data["loss_mask"]).asnumpy().copy()
    loss = model(attention_mask=None, **data)
    autograd.backward(loss)
    return {"loss": float(loss.asnumpy()), "gradients": builders.local_gradients(model), "logits": logits}


@pytest.mark.parametrize("eod", [None, 5])
@pytest.mark.parametrize("model", MODELS)
def test_guide_model_equals_packaged_model(world, model, eod):
    guide, packaged = (world(2)(run, source, MODELS[model], TP2_SP, eod) for source in ("guide", "packaged"))
    assert_equal_runs(guide, packaged, 1e-6)
    for one, other in zip(guide, packaged):
        assert one["logits"].shape == (2, builders.SIZES["seq_length"], builders.SIZES["vocab_size"] // 2)
        np.testing.assert_array_equal(one["logits"], other["logits"])


def guide_model():
    """The guide's own class; imported where the rank runs."""
    from tests.guide.guide_model import GPTModel

    return GPTModel


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}],
    ids=["pp2", "pp2vpp2"],
)
def test_guide_model_on_two_stages_with_tied_embeddings(world, parallel):
    """Trains like the packaged model on one rank; the copies of the tied weight stay equal."""
    reference = world(1)(job.train, job.TIED)
    results = world(2)(job.train, job.TIED, parallel, model_class=guide_model)
    job.assert_equal_trainings(results, reference, tied=True)
