"""The entry of context parallelism against float64 references: few key groups, wide values, sinks, windows, half precisions."""

import numpy as np
import pytest

from tests.ops import references
from tests.ops.harness import TOLERANCE, assert_close, tensor, values

LENGTH, BATCH, SIZE, WIDTH = 48, 2, 8, 6
CUTS = {"alone": (1, 1), "ring3": (1, 3), "ulysses2": (2, 1), "ulysses3": (3, 1), "hybrid3x2": (3, 2), "ring2": (1, 2)}
CASES = {
    "one group": {"groups": 1},
    "two groups": {"groups": 2},
    "window": {"groups": 6, "window": 10},
    "sinks": {"groups": 2, "sinks": True},
    "both sides": {"groups": 2, "causal": False},
    "float16": {"groups": 2, "dtype": "float16"},
    "bfloat16": {"groups": 1, "dtype": "bfloat16", "sinks": True},
}


def _arrays(groups, heads=6):
    random = np.random.default_rng(3)
    shapes = ((heads, SIZE), (groups, SIZE), (groups, WIDTH), (heads, WIDTH))
    return [random.normal(size=(LENGTH, BATCH, *shape)) for shape in shapes], random.normal(size=heads)


def attend(cut, groups, window=None, causal=True, sinks=False, dtype="float32"):
    """(positions, output, gradients of query, key, value, gradient of the sinks) of this rank."""
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.context_parallel import context_parallel_attention, local_position_ids

    ulysses, ring = cut
    parallel_state.initialize_model_parallel(context_parallel_size=ulysses * ring, ulysses_degree_in_cp=ulysses)
    places = local_position_ids(LENGTH // (ulysses * ring)).asnumpy()[0]
    arrays, scores = _arrays(groups)
    q, k, v, grad = (tensor(array[places], dtype) for array in arrays)
    leaves = [autograd.set_requires_grad(t) for t in (q, k, v)]
    if sinks:
        leaves.append(autograd.set_requires_grad(tensor(scores, dtype)))
    output = context_parallel_attention(
        *leaves[:3],
        lower=None if window is None else 1 - window,
        upper=0 if causal else None,
        sinks=leaves[3] if sinks else None,
    )
    grads = autograd.grad(output, leaves, grad.reshape(output.shape))
    return places, values(output), [values(g) for g in grads]


def _expected(groups, window=None, causal=True, sinks=False, dtype="float32"):
    arrays, scores = _arrays(groups)
    q, k, v, grad = (values(tensor(array, dtype)) for array in arrays)
    blocked = references.band(LENGTH, LENGTH, -LENGTH if window is None else 1 - window, 0 if causal else LENGTH)
    scale = SIZE**-0.5
    if not sinks:
        return references.attention(q, k, v, blocked, scale), references.attention_gradients(q, k, v, blocked, scale, grad)
    # one more key for each head with the sink as its score and no value
    repeat = q.shape[2] // groups
    wide = [np.repeat(t, repeat, 2) for t in (k, v)]
    sink = np.broadcast_to(values(tensor(scores, dtype))[None, :, None, None], (BATCH, q.shape[2], LENGTH, 1))
    hidden = np.concatenate([np.zeros((LENGTH, 1), bool), blocked], 1)
    p = references.softmax(np.concatenate([sink, np.einsum("ibnd,jbnd->bnij", q, wide[0]) * scale], -1), hidden)
    out = np.einsum("bnij,jbnd->ibnd", p[..., 1:], wide[1])
    dp = np.einsum("ibnd,jbnd->bnij", grad, wide[1])
    ds = p * (np.concatenate([np.zeros_like(sink), dp], -1) - np.einsum("ibnd,ibnd->bni", grad, out)[..., None])
    grads = (
        np.einsum("bnij,jbnd->ibnd", ds[..., 1:], wide[0]) * scale,
        np.einsum("bnij,ibnd->jbnd", ds[..., 1:], q) * scale,
        np.einsum("bnij,ibnd->jbnd", p[..., 1:], grad),
    )
    grouped = [t.reshape(LENGTH, BATCH, groups, repeat, -1).sum(3) for t in grads[1:]]
    return out.reshape(LENGTH, BATCH, -1), (grads[0], *grouped, ds[..., 0].sum(axis=(0, 2)))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(world, case, cut):
    options = CASES[case]
    results = world(CUTS[cut][0] * CUTS[cut][1])(attend, CUTS[cut], **options)
    output, grads = _expected(**options)
    tolerance = 4 * TOLERANCE[options.get("dtype", "float32")]
    for places, found, found_grads in results:
        assert_close(found, output[places], tolerance, "output")
        for name, own, whole in zip("qkv", found_grads, grads):
            assert_close(own, whole[places], 2 * tolerance, f"gradient of {name}")
    if options.get("sinks"):
        assert_close(sum(result[2][3] for result in results), grads[3], 2 * tolerance, "gradient of the sinks")
