"""Mixture of experts: products grouped by expert, the order of tokens by expert, choices of the router.

Rows stand sorted by expert; `counts` (integers of the host, [experts]) says how many rows each has, none for some or all of
them. Which row comes from which token is `order`, [rows] (int), as `expert_order` returns it.
"""

from mindspeed_ms.ops.forms import operator


@operator
def grouped_linear(x, weight, counts):
    """Product of each expert's rows with its weight, differentiable.

    Args:
        x (Tensor): [rows, in]; float32, float16 or bfloat16.
        weight (Tensor): [experts, in, out], dtype of `x`; `weight1` and `weight2` of `layout.layer_parameters.GroupedExperts`.
        counts (Sequence[int]): rows of each expert; their sum is `rows`.

    Returns:
        Tensor [rows, out] in the dtype of `x`; half precisions are summed in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or counts that do not fit.
    """


@operator
def grouped_linear_forward(x, weight, counts):
    """`grouped_linear` without a gradient: for layers that write their own backward."""


@operator
def grouped_linear_input_grad(output_grad, weight, counts):
    """Gradient of a grouped linear's input: [rows, out], [experts, in, out] -> [rows, in]. Not differentiable."""


@operator
def grouped_linear_weight_grad(output_grad, x, counts, accumulate_into=None, overwrite=False):
    """Gradient of a grouped linear's weight: [rows, out], [rows, in] -> [experts, in, out], zero for experts without rows.

    Args:
        accumulate_into (Tensor): storage tensor [experts, in, out] (float32, or the dtype of `x`) to which the gradient is
            added in place in the same product; it is returned. None: a new tensor in the dtype of `x`.
        overwrite: write the gradient there instead of adding it, for the first micro-batch of a step.
    """


@operator
def expert_order(routing_map):
    """Order of rows by expert, then by token, of a routing map [tokens, experts] (bool, or integers not 0 where a token goes
    to an expert): (order [rows] int32, counts: int64 array of the host [experts]). Not differentiable.
    """


@operator
def permute(x, order):
    """Rows of `x` in the order of the experts, differentiable: [tokens, h], [rows] -> [rows, h]; a token may come several
    times or not at all. The gradient adds rows in their order, so it is the same on every run.
    """


@operator
def unpermute(x, order, tokens, probs=None):
    """Sum of each token's rows, weighted by `probs` [rows] if given: [rows, h], [rows] -> [tokens, h]; zero for a token
    without rows. Differentiable in `x` and `probs`; added in float32 in the order of the rows, rounded once.
    """


@operator
def permute_probs(probs, order, counts):
    """Probability of each row: element (token, expert) of `probs` [tokens, experts] -> [rows]; differentiable."""


@operator
def top_k(x, k):
    """The `k` largest elements of each row, descending: [..., n] -> (values [..., k], indices [..., k] int32).

    Differentiable in the values. Among equal elements the lower index comes first on CPU.

    Raises:
        ValueError: `k` is not in 1 to n.
    """


@operator
def gather_columns(x, indices):
    """Elements of each row at `indices` (different ones in a row), differentiable: [..., n], [..., k] -> [..., k]."""


@operator
def scatter_columns(values, indices, columns):
    """Rows of `columns` elements: `values` at `indices` (different ones in a row), else 0; differentiable: twice [..., k]
    -> [..., columns].
    """


@operator
def softmax(x):
    """Softmax over the last dimension, differentiable; computed in float32."""


@operator
def sigmoid(x):
    """`1 / (1 + exp(-x))`, differentiable; computed in float32."""


@operator
def log_sum_exp(x):
    """Logarithm of the sum of exponentials over the last dimension, differentiable: [..., n] -> [...]; computed in
    float32.
    """


@operator
def linear_summed_in_double(x, weight):
    """`x @ weight^T`, computed and summed in float64 and rounded to float32 once, differentiable: [..., in], [out, in] -> [...,
    out]; gradients in the dtypes of x and weight. Ascend has no float64 product: there it is computed in float32.
    """
