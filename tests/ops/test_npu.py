"""Operators of upstream's public API on CPU."""

import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import rng
from tests.ops import references
from tests.ops.harness import assert_close, check, tensor, values


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _rms_norm():
    x, gamma = _normal(3, 2, 8), _normal(8, seed=1)
    check(lambda x, g: ops.npu_rms_norm(x, g)[0], references.rms_norm, [x, gamma])
    _, inverse = ops.npu_rms_norm(tensor(x), tensor(gamma))
    assert_close(values(inverse), 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), 1e-6, "inverse root mean square")


def _rotary():
    for mode in (0, 1):
        for shape in ((1, 1, 4, 6), (2, 1, 4, 6), (2, 3, 4, 6), (1, 3, 1, 6), (2, 1, 1, 6)):
            cos, sin = _normal(*shape, seed=1).astype(np.float32), _normal(*shape, seed=2).astype(np.float32)
            check(
                lambda x, c=cos, s=sin, m=mode: ops.npu_rotary_position_embedding(x, Tensor(c), Tensor(s), m),
                lambda x, c=cos, s=sin, m=mode: references.rotary(x, c.astype(float), s.astype(float), bool(m)),
                [_normal(2, 3, 4, 6)],
            )
    with pytest.raises(ValueError, match="mode=2"):
        ops.npu_rotary_position_embedding(tensor(_normal(2, 3, 4, 6)), Tensor(cos), Tensor(sin), 2)


def _fusion_attention():
    q, k, v = _normal(5, 2, 4, 8), _normal(7, 2, 2, 8, seed=1), _normal(7, 2, 2, 8, seed=2)
    orders = {"SBH": (0, 1, 2, 3), "BSH": (1, 0, 2, 3), "BNSD": (1, 2, 0, 3), "BSND": (1, 0, 2, 3)}
    hidden = references.band(5, 7, -99, 2)
    expected = references.attention(q, k, v, hidden, 0.3)
    scores = np.where(hidden, -np.inf, np.einsum("ibnd,jbnd->bnij", q, np.repeat(k, 2, 2)) * 0.3)
    for layout, order in orders.items():

        def arrange(t, layout=layout, order=order):
            t = t.transpose(order)
            return tensor(t if layout.endswith("D") else t.reshape(*t.shape[:2], -1))

        output, maximum, total = ops.npu_fusion_attention(
            arrange(q), arrange(k), arrange(v), 4, layout, scale=0.3, sparse_mode=3
        )
        right = arrange(expected.reshape(q.shape))
        assert_close(values(output), values(right), 3e-6, layout)
        assert maximum.shape == total.shape == (2, 4, 5, 8)
        assert_close(values(maximum)[..., 3], scores.max(-1), 1e-6, "maximum")
        assert_close(values(total)[..., 7], np.exp(scores - scores.max(-1, keepdims=True)).sum(-1), 1e-6, "sum")
    flat = [tensor(t.reshape(*t.shape[:2], -1)) for t in (q, k, v)]
    rng.get_rng_tracker().set_default(3)
    first, second = (values(ops.npu_fusion_attention(*flat, 4, "SBH", scale=0.3, keep_prob=0.5)[0]) for _ in range(2))
    assert (first != second).any()
    for options, text in (
        ({"pse": flat[0]}, "got pse"),
        ({"pse_type": 2}, "pse_type=2"),
        ({"sparse_mode": 6}, "sparse_mode=6"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.npu_fusion_attention(*flat, 4, "SBH", **options)


@pytest.mark.parametrize("case", (_rms_norm, _rotary, _fusion_attention), ids=lambda case: case.__name__[1:])
def test_upstream_operator(world, case):
    world(1)(case)
