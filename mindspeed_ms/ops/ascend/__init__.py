"""Ascend forms: documented MindSpore operators, differentiated by MindSpore. Not run on hardware by this project's
tests.

`tests/ascend` runs each form against stand-ins that check every call against the installed operator's signature and the
dtypes, shapes and layouts of its documentation. Operators are looked up at the call (`mint.matmul`), never copied into
names.
"""

from mindspeed_ms.ops.ascend.activation import bias_activation
from mindspeed_ms.ops.ascend.attention import (
    apply_rotary,
    core_attention,
    flash_attention,
    fusion_attention,
    rotary_position_embedding,
    scaled_masked_softmax,
    split_query_key_value,
)
from mindspeed_ms.ops.ascend.dropout import bias_dropout_add, dropout
from mindspeed_ms.ops.ascend.linear import (
    bias_grad,
    embedding_lookup,
    linear,
    linear_forward,
    linear_input_grad,
    linear_weight_grad,
    matmul,
)
from mindspeed_ms.ops.ascend.loss import (
    cross_entropy_gradient,
    cross_entropy_local_max,
    cross_entropy_local_sums,
    cross_entropy_loss,
)
from mindspeed_ms.ops.ascend.normalization import layer_norm, rms_norm, rms_norm_with_inverse
from mindspeed_ms.ops.ascend.optimizer import adamw_step, add_into, count_zeros, scale_in_place, sgd_step, sum_of_squares

__all__ = [
    "adamw_step",
    "add_into",
    "apply_rotary",
    "bias_activation",
    "bias_dropout_add",
    "bias_grad",
    "core_attention",
    "count_zeros",
    "cross_entropy_gradient",
    "cross_entropy_local_max",
    "cross_entropy_local_sums",
    "cross_entropy_loss",
    "dropout",
    "embedding_lookup",
    "flash_attention",
    "fusion_attention",
    "layer_norm",
    "linear",
    "linear_forward",
    "linear_input_grad",
    "linear_weight_grad",
    "matmul",
    "rms_norm",
    "rms_norm_with_inverse",
    "rotary_position_embedding",
    "scale_in_place",
    "scaled_masked_softmax",
    "sgd_step",
    "split_query_key_value",
    "sum_of_squares",
]
