"""Kernels of low-rank adapters: the gradients of their two narrow matrices."""

from mindspeed_ms.ops.cpu.compiler import kernel
from mindspeed_ms.ops.cpu.kernels.panels import COLUMNS, add_product


@kernel
def narrow_weight_grad(start, stop, narrow, wide, result):
    """Groups `start` to `stop` of COLUMNS columns of result [r, n] = narrow [tokens, r]^T wide [tokens, n].

    Each element of `wide` is read once, which BLAS does not manage with a handful of rows.
    """
    left, right = start * COLUMNS, min(stop * COLUMNS, wide.shape[1])
    add_product(narrow.T, wide[:, left:right], result[:, left:right], False, False)
