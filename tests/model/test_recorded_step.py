"""The first step of recorded Megatron runs: logits, loss and every gradient, in several layouts."""

import json

import numpy as np
import pytest

from mindspeed_ms.testing.parity.names import our_names
from mindspeed_ms.testing.parity.recordings import golden_folder
from tests.model import builders

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def first_step(variant, path, parallel):
    """Logits and losses of both micro-batches of step 0, and the gradients of their mean."""
    from mindspore import Tensor

    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config = builders.make_config(builders.VARIANTS[variant], **parallel)
    builders.start(config)
    model = builders.make_model(config)
    with np.load(path) as data:
        names = our_names([key[3:] for key in data.files if key.startswith("w0/")])
        builders.fill(model, {ours: data["w0/" + name] for name, ours in names.items()})
        fields = {name: data[name][0] for name in ("tokens", "labels", "loss_mask")}
    logits, losses = [], []
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: Tensor.from_numpy(np.ascontiguousarray(array[rows])) for name, array in fields.items()}
        with autograd.no_grad():
            output = gather_from_tensor_model_parallel_region(model(part["tokens"]))
        logits.append(output.asnumpy().copy())
        loss = model(**part)
        autograd.backward(loss * 0.5)
        losses.append(float(loss.asnumpy()))
    return {
        "logits": logits,
        "losses": losses,
        "gradients": builders.local_gradients(model),
        "rank": parallel_state.get_tensor_model_parallel_rank(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", builders.VARIANTS)
def test_first_step_equals_megatron(world, variant, layout):
    """Logits and loss within 1e-5, each gradient within 2e-5 of its norm."""
    if golden_folder() is None:
        pytest.skip("the full recordings are not here")
    path = golden_folder() / f"single_{variant}.npz"
    parallel = LAYOUTS[layout]
    results = world(parallel.get("tensor_model_parallel_size", 1))(first_step, variant, str(path), parallel)
    with np.load(path) as data:
        assert json.loads(str(data["meta"]))["variant"] == variant
        names = our_names([key[6:] for key in data.files if key.startswith("grad0/")])
        for result in results:
            for index in range(2) if "logits0/mb0" in data.files else ():
                np.testing.assert_allclose(result["logits"][index], data[f"logits0/mb{index}"], atol=2e-5, rtol=1e-5)
        counts = data["loss_mask"][0].reshape(2, -1).sum(axis=1)
        loss = np.dot(results[0]["losses"], counts) / counts.sum()
        assert abs(loss - data["loss"][0]) < 1e-5 * data["loss"][0]
        whole = builders.joined(results, "gradients")
        assert set(whole) == set(names.values())
        for name, ours in names.items():
            expected = data["grad0/" + name]
            error = np.linalg.norm(whole[ours] - expected) / np.linalg.norm(expected)
            assert error < 2e-5, f"{ours}: {error}"
