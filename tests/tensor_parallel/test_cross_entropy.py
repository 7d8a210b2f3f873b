"""Cross entropy over a split vocabulary: goldens, label smoothing, state per call."""

import numpy as np
import pytest

VOCAB, SHAPE = 32, (3, 5)


def _data():
    random = np.random.RandomState(0)
    return random.randn(*SHAPE, VOCAB).astype(np.float32) * 3, random.randint(0, VOCAB, SHAPE).astype(np.int32)


def goldens():
    """Numbers of upstream's documentation."""
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
    from mindspeed_ms.training.loss_func import LossWithMask

    parallel_state.initialize_model_parallel()
    loss = VocabParallelCrossEntropy()
    two = loss(Tensor(np.array([[2.0, 1.0, 0.2]] * 2, np.float32)), Tensor(np.array([1, 1], np.int32)))
    logits = Tensor(np.array([[3, 5, 6, 9, 12, 33, 42, 12, 32, 72]], np.float32))
    label, mask = Tensor(np.array([1], np.int32)), Tensor(np.array([1.0], np.float32))
    masked = LossWithMask(loss)
    nothing = masked(logits, label, Tensor(np.zeros(1, np.float32)))
    with pytest.raises(ValueError, match="shape"):
        masked(logits, label, Tensor(np.ones((1, 1), np.float32)))
    with pytest.raises(ValueError, match="target"):
        loss(logits, two)
    with pytest.raises(ValueError, match="targets are float32: expected integers"):
        loss(logits, label.float())
    with pytest.raises(ValueError, match="label_smoothing"):
        loss(logits, label, 1.0)
    with pytest.raises(ValueError, match="takes no"):
        VocabParallelCrossEntropy(ignore_index=0)
    return two, masked(logits, label, mask), nothing


def test_goldens(world):
    two, masked, nothing = world(1)(goldens)[0]
    np.testing.assert_allclose(two, [1.4273429, 1.4273429], rtol=1e-6)
    assert masked == 67.0 and masked.shape == ()
    assert nothing == 0.0


def losses(size, smoothing):
    """Two losses whose backwards run afterwards, in the opposite order."""
    from mindspore import Tensor

    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    parallel_state.initialize_model_parallel(size)
    logits, target = _data()
    own = np.split(logits, size, -1)[parallel_state.get_tensor_model_parallel_rank()]
    cell, leaves, values = VocabParallelCrossEntropy(), [], []
    for factor in (1.0, 0.5):
        leaves.append(autograd.set_requires_grad(Tensor.from_numpy(np.ascontiguousarray(own * factor))))
        values.append(cell(leaves[-1], Tensor.from_numpy(target), smoothing))
    for value in reversed(values):
        autograd.backward(value)
    return [(value, autograd.tensor_grad(leaf)) for value, leaf in zip(values, leaves)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("size", [1, 4])
def test_any_number_of_losses_may_await_their_backward(world, size, smoothing):
    """Label smoothing spreads over the whole vocabulary, not over a rank's part."""
    results = world(size)(losses, size, smoothing)
    logits, target = _data()
    spread = smoothing * VOCAB / (VOCAB - 1)
    onehot = np.eye(VOCAB)[target]
    for index, factor in enumerate((1.0, 0.5)):
        x = logits.astype(np.float64) * factor
        log_probability = x - np.log(np.exp(x).sum(-1, keepdims=True))
        expected = -(1 - spread) * (log_probability * onehot).sum(-1) - spread * log_probability.mean(-1)
        gradient = np.exp(log_probability) - (1 - spread) * onehot - spread / VOCAB
        for result in results:
            np.testing.assert_allclose(result[index][0], expected, rtol=2e-6)
        whole = np.concatenate([result[index][1] for result in results], -1)
        np.testing.assert_allclose(whole, gradient, atol=1e-6)


def overwritten():
    """The gradient may take the place of the logits, once."""
    from mindspore import Tensor

    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    parallel_state.initialize_model_parallel()
    logits, target = _data()
    leaf = autograd.set_requires_grad(Tensor.from_numpy(logits))
    loss = VocabParallelCrossEntropy(overwrite_logits=True)(leaf * 1.0, Tensor.from_numpy(target))
    autograd.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        autograd.backward(loss)
    return autograd.tensor_grad(leaf)


def test_overwritten_logits(world):
    gradient = world(1)(overwritten)[0]
    logits, target = _data()
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    expected = exponentials / exponentials.sum(-1, keepdims=True) - np.eye(VOCAB)[target]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
