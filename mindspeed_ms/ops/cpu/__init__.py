"""CPU forms: autograd Functions around numba kernels on the tensors' own memory, and MindSpore's matrix product."""

from mindspeed_ms.ops.cpu.activation import bias_activation
from mindspeed_ms.ops.cpu.attention import (
    apply_rotary,
    core_attention,
    flash_attention,
    scaled_masked_softmax,
    split_query_key_value,
)
from mindspeed_ms.ops.cpu.dropout import bias_dropout_add, dropout
from mindspeed_ms.ops.cpu.embedding import embedding_lookup
from mindspeed_ms.ops.cpu.linear import bias_grad, linear, linear_forward, linear_input_grad, linear_weight_grad, matmul
from mindspeed_ms.ops.cpu.loss import (
    cross_entropy_gradient,
    cross_entropy_local_max,
    cross_entropy_local_sums,
    cross_entropy_loss,
)
from mindspeed_ms.ops.cpu.normalization import layer_norm, rms_norm, rms_norm_with_inverse
from mindspeed_ms.ops.cpu.npu import fusion_attention, rotary_position_embedding
from mindspeed_ms.ops.cpu.optimizer import adamw_step, add_into, count_zeros, scale_in_place, sgd_step, sum_of_squares

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
