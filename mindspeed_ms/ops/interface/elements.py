"""Casts, sums, biases, joins and masks of documents: small operators that every training step calls often.

MindSpore's own operators keep a block of host memory for each scalar argument (dtype, axis, flag) of each call on CPU, 680
bytes in 2.10, so that a training grows by them (`docs/architecture.md`).
"""

from mindspeed_ms.ops.forms import operator


@operator
def cast(x, dtype):
    """`x` in `dtype`, differentiable; `x` itself if it has that dtype.

    Args:
        x (Tensor): floats, integers or booleans.
        dtype: MindSpore dtype or its name.
    """


@operator
def total(x):
    """Sum of all elements, differentiable: [...] -> scalar of the dtype of `x` (float), accumulated in float64 on CPU."""


@operator
def row_sums(x):
    """Sum of each row, differentiable: float32 [b, n] -> [b], accumulated in float64 on CPU."""


@operator
def log_sigmoid(x):
    """log(1 / (1 + exp(-x))), differentiable, finite for every finite `x`: float32 [...]."""


@operator
def add_bias(x, bias):
    """`x + bias`, differentiable: [..., n] and [n], of one dtype -> [..., n]."""


@operator
def scaled(x, factor):
    """`x * factor` by a number, in the dtype of `x`. Not differentiable."""


@operator
def is_zero(x):
    """1.0 where an element is 0, else 0.0: float32 like `x`; added to a count, it makes a divisor of it. Not
    differentiable.
    """


@operator
def cat(tensors, dim=0):
    """Join tensors of one dtype along `dim`, differentiable."""


@operator
def cat_shared(own, shared):
    """Join the heads' own elements with those that all heads share, differentiable: [s, b, n, i] and [s, b, 1, j] -> [s, b,
    n, i + j].
    """


@operator
def document_mask(ids, end):
    """Positions and attention mask of packed documents, each of which ends with the token `end`: ids [b, s] (int) ->
    (positions in the document [b, s] int32, mask [b, s, s] uint8: 1 where query i may not look at key j, since j is later or
    in another document). Not differentiable.
    """
