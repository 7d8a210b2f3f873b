"""Compares operators with float64 numpy references: values, and gradients by central differences. Runs inside a
world.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindspeed_ms.core import autograd
from mindspeed_ms.core.device import to_dtype

TOLERANCE = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
"""Allowed error relative to the largest element of the reference: a few roundings of the dtype."""


def tensor(array, dtype="float32"):
    """Tensor of a float array rounded to `dtype`."""
    return Tensor(np.ascontiguousarray(array, np.float32)).astype(to_dtype(dtype))


def values(t):
    """float64 array of a tensor's values."""
    return t.astype(ms.float32).asnumpy().astype(np.float64)


def numeric_gradients(reference, arrays, output_grads, step=1e-5):
    """Gradients of sum(output * output_grad) with respect to each array, by central differences in float64."""

    def objective(*changed):
        outputs = reference(*changed)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(float((o * g).sum()) for o, g in zip(outputs, output_grads, strict=True))

    gradients = []
    for index, array in enumerate(arrays):
        gradient = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            changed = [a.copy() if k == index else a for k, a in enumerate(arrays)]
            changed[index][place] += step
            above = objective(*changed)
            changed[index][place] -= 2 * step
            gradient[place] = (above - objective(*changed)) / (2 * step)
        gradients.append(gradient)
    return gradients


def assert_close(actual, expected, tolerance, what):
    """Largest difference against the largest element of `expected`."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    error = float(np.abs(actual - expected).max()) if expected.size else 0.0
    size = float(np.abs(expected).max()) if expected.size else 0.0
    assert error <= tolerance * max(size, 1e-3), f"{what}: error {error:.3g} with values up to {size:.3g}"


def check(operator, reference, arrays, dtype="float32", tolerance_factor=1.0, gradients=None):
    """Assert that `operator(*tensors)` and its gradients equal `reference(*float64 arrays)` to the dtype's rounding.

    `gradients(*arrays, *output_grads)` gives the reference gradients; None: central differences.
    """
    tensors = [autograd.set_requires_grad(tensor(array, dtype)) for array in arrays]
    exact = [values(t) for t in tensors]
    outputs = operator(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    expected = reference(*exact)
    expected = expected if isinstance(expected, tuple) else (expected,)
    tolerance = TOLERANCE[dtype] * tolerance_factor
    rng = np.random.default_rng(7)
    output_grads = [tensor(rng.normal(size=o.shape), dtype) for o in outputs]
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        assert output.dtype == to_dtype(dtype), f"output {index} is {output.dtype}, not {dtype}"
        assert_close(values(output), right, tolerance, f"output {index}")
    grads = autograd.grad(outputs, tensors, output_grads)
    exact_grads = [values(g) for g in output_grads]
    if gradients is None:
        expected_grads = numeric_gradients(reference, exact, exact_grads)
        tolerance += 1e-8
    else:
        expected_grads = gradients(*exact, *exact_grads)
    for index, (grad, right) in enumerate(zip(grads, expected_grads, strict=True)):
        assert grad.dtype == tensors[index].dtype, f"gradient {index} is {grad.dtype}, not {dtype}"
        assert_close(values(grad), right, 3 * tolerance, f"gradient {index}")
