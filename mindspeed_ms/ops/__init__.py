"""Operators of the model: one function per kernel, each with a CPU and an Ascend form.

Tensors are MindSpore Tensors. Functions are differentiable unless they say otherwise. float32 is exact to float32
rounding; float16 and bfloat16 are storage dtypes: computed in float32, rounded once (to nearest even), gradients in the input's
dtype. The form is chosen by the device at the first call; `use_forms` overrides it.
"""

from mindspeed_ms.ops.checks import ACTIVATION_NAMES, HALVING, INPUT_LAYOUTS
from mindspeed_ms.ops.forms import current_forms, use_forms
from mindspeed_ms.ops.interface.activation import bias_activation, gelu, relu, silu, squared_relu, swiglu
from mindspeed_ms.ops.interface.attention import UNLIMITED_TOKENS, core_attention, flash_attention, scaled_masked_softmax
from mindspeed_ms.ops.interface.cached_attention import cached_attention
from mindspeed_ms.ops.interface.dropout import bias_dropout_add, dropout, residual_add
from mindspeed_ms.ops.interface.elements import (
    add_bias,
    cast,
    cat,
    cat_shared,
    document_mask,
    is_zero,
    log_sigmoid,
    row_sums,
    scaled,
    total,
)
from mindspeed_ms.ops.interface.embedding import embedding_lookup
from mindspeed_ms.ops.interface.experts import (
    expert_order,
    gather_columns,
    grouped_linear,
    grouped_linear_forward,
    grouped_linear_input_grad,
    grouped_linear_weight_grad,
    linear_summed_in_double,
    log_sum_exp,
    permute,
    permute_probs,
    scatter_columns,
    sigmoid,
    softmax,
    top_k,
    unpermute,
)
from mindspeed_ms.ops.interface.linear import (
    add_linear,
    add_linear_input_grad,
    batch_matmul,
    bias_grad,
    linear,
    linear_forward,
    linear_input_grad,
    linear_weight_grad,
    matmul,
    narrow_weight_grad,
)
from mindspeed_ms.ops.interface.loss import (
    cross_entropy_gradient,
    cross_entropy_local_max,
    cross_entropy_local_sums,
    cross_entropy_loss,
)
from mindspeed_ms.ops.interface.normalization import add_rms_norm, layer_norm, rms_norm
from mindspeed_ms.ops.interface.optimizer import adamw_step, add_into, count_zeros, scale_in_place, sgd_step, sum_of_squares
from mindspeed_ms.ops.interface.partial_attention import attention_with_statistics, attention_with_statistics_gradient
from mindspeed_ms.ops.interface.rotary import apply_rotary, split_query_key_value
from mindspeed_ms.ops.npu import npu_fusion_attention, npu_rms_norm, npu_rotary_position_embedding
