"""The part of `model_config` about layers: activation, norms, residual, initialisation, data types, dropout."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, OFF, ON, SWITCH, TAKEN, Alias, field
from mindspeed_ms.config.values import Bool, Dtype, Free, NotNegative, PositiveFloat, Probability, number, one_of
from mindspeed_ms.layout.model_description import NORMALIZATIONS

ACTIVATIONS = (
    "gelu",
    "gelu_tanh",
    "gelu_erf",
    "fast_gelu",
    "swiglu",
    "fused_swiglu",
    "clamped_swiglu",
    "silu",
    "relu",
    "squared_relu",
)
ONE_KERNEL = ("chooses the operator on Ascend; on CPU one kernel does both", "在Ascend上选择算子；CPU上两者为同一算子")
SAME_NUMBERS = ("the kernels here are fused where that helps; the numbers are the same", "本框架已在有益处融合算子，数值相同")


class LayerFields(Section):
    """Feed-forward block, norms, residual, initialisation, data types, dropout."""

    hidden_act: one_of(*ACTIVATIONS) = field(
        "gelu",
        "Activation of the feed-forward block.",
        "前馈网络的激活函数。",
        "output",
        megatron=None,
        aliases=(
            Alias(
                "swiglu",
                "Gated activation: the same as hidden_act swiglu.",
                "门控激活，等同hidden_act: swiglu。",
                value="swiglu",
                seen="parameters",
            ),
            Alias("openai_gelu", "The same as hidden_act gelu_tanh.", "等同hidden_act: gelu_tanh。", value="gelu_tanh"),
            Alias(
                "squared_relu", "The same as hidden_act squared_relu.", "等同hidden_act: squared_relu。", value="squared_relu"
            ),
        ),
        checkpoint=COMPARED,
    )
    swiglu_limit: PositiveFloat = field(
        7.0,
        "clamped_swiglu: the gate is at most this, the other half within plus and minus this.",
        "clamped_swiglu：门控的上限，另一半限制在正负该值内。",
        "output",
        also=("--activation-func-clamp-value",),
        checkpoint=COMPARED,
    )
    swiglu_alpha: PositiveFloat = field(
        1.702,
        "clamped_swiglu: factor of the gate inside its sigmoid.",
        "clamped_swiglu：门控在sigmoid内的系数。",
        "output",
        checkpoint=COMPARED,
    )
    gated_linear_unit: Bool = field(
        False,
        "The feed-forward block has a gate.",
        "前馈网络带门控。",
        "error",
        derived="hidden_act",
        form=SWITCH,
        checkpoint=COMPARED,
    )
    apply_swiglu_fusion: Bool = field(
        False,
        "Use the fused swiglu operator.",
        "使用融合的swiglu算子。",
        "operators",
        name="use_fused_swiglu",
        also=("--apply-swiglu-fusion",),
        note=ONE_KERNEL,
    )
    bias_gelu_fusion: Bool = field(
        False,
        "Fused bias and gelu: the tanh form of gelu.",
        "偏置与gelu融合，使用tanh形式的gelu。",
        "output",
        form=OFF,
        megatron=True,
        checkpoint=TAKEN,
    )
    bias_swiglu_fusion: Bool = field(
        False,
        "Fused bias and swiglu; same numbers.",
        "偏置与swiglu融合，数值相同。",
        "log",
        form=OFF,
        megatron=True,
        ignored=SAME_NUMBERS,
    )

    normalization: one_of(*NORMALIZATIONS) = field(
        "LayerNorm",
        "Norm layers.",
        "归一化层的种类。",
        "parameters",
        aliases=(
            Alias(
                "use_fused_rmsnorm",
                "RMSNorm by the fused operator: normalization FusedRMSNorm.",
                "使用融合的RMSNorm，即normalization: FusedRMSNorm。",
                convert=conversions.fused_rmsnorm,
                seen="operators",
            ),
        ),
        checkpoint=COMPARED,
    )
    norm_epsilon: PositiveFloat = field(1e-05, "Epsilon of the norms.", "归一化的epsilon。", "output", checkpoint=COMPARED)
    apply_layernorm_1p: Bool = field(
        False,
        "Norm weights are stored minus one.",
        "归一化权重以减一的形式存放。",
        "error",
        refused=("norm weights are stored as they are, not minus one", "归一化权重按原值存放，不减一"),
        checkpoint=COMPARED,
    )
    use_sandwich_norm: Bool = field(
        False,
        "A second norm after attention and after feed-forward.",
        "在注意力和前馈之后再加一次归一化。",
        "parameters",
        checkpoint=COMPARED,
    )
    attn_post_norm_scale: Probability = field(
        1.0, "Initial weight of the norm after attention.", "注意力之后归一化的初始权重。", "parameters"
    )
    ffn_post_norm_scale: Probability = field(
        1.0, "Initial weight of the norm after feed-forward.", "前馈之后归一化的初始权重。", "parameters"
    )
    apply_residual_connection_post_norm: Bool = field(
        False,
        "The residual is taken after the norm instead of before.",
        "残差取自归一化之后而不是之前。",
        "output",
        name="apply_residual_connection_post_layernorm",
        also=("--apply-residual-connection-post-norm",),
        checkpoint=COMPARED,
    )
    use_final_norm: Bool = field(
        True,
        "Norm after the last layer.",
        "最后一层之后做归一化。",
        "parameters",
        form=ON,
        off="--no-post-layer-norm",
        checkpoint=COMPARED,
    )
    residual_connection_dtype: Dtype | None = field(
        None,
        "Data type of the residual stream.",
        "残差流的数据类型。",
        "output",
        derived="float32 with fp32_residual_connection, else compute_dtype",
    )
    fp32_residual_connection: Bool = field(False, "Keep the residual stream in fp32.", "残差流保持fp32。", "output")

    init_method_std: NotNegative = field(
        0.01, "Standard deviation of the normal initialisation.", "正态初始化的标准差。", "parameters", megatron=0.02
    )
    embedding_init_std: NotNegative | None = field(
        None, "Standard deviation for the embeddings.", "词嵌入初始化的标准差。", "parameters", derived="init_method_std"
    )
    scaled_output_init: Bool = field(
        True,
        "Output projections start with std / sqrt(2 * num_layers).",
        "输出投影以std/sqrt(2*层数)初始化。",
        "parameters",
        form=SWITCH,
    )
    init_method: Free = field("normal", "Initialiser of weights: a name or a number.", "权重初始化：名称或数值。", "parameters")
    bias_init: Free = field("zeros", "Initialiser of biases: a name or a number.", "偏置初始化：名称或数值。", "parameters")

    params_dtype: Dtype = field("float32", "Data type of the parameters.", "参数的数据类型。", "parameters", megatron=None)
    compute_dtype: Dtype | None = field(
        None, "Data type of the computation.", "计算的数据类型。", "output", derived="params_dtype"
    )
    softmax_compute_dtype: Dtype = field(
        "float32",
        "Data type of the attention softmax.",
        "注意力softmax的数据类型。",
        "operators",
        derived="float32 with attention_softmax_in_fp32, else compute_dtype",
    )
    embedding_init_dtype: Dtype = field(
        "float32",
        "Data type in which embedding weights are drawn.",
        "词嵌入初始化时的数据类型。",
        "parameters",
        name="embedding_dtype",
        also=("--embedding-init-dtype",),
        yaml_names=("embedding_dtype",),
    )
    fp16_lm_cross_entropy: Bool = field(False, "Cross entropy in fp16.", "交叉熵使用fp16。", "operators")
    label_smoothing: number(ge=0, lt=1) = field(
        0.0, "Share of the target spread over the vocabulary.", "标签平滑系数。", "output"
    )
    attention_dropout: Probability = field(
        0.0,
        "Dropout on attention weights.",
        "注意力权重的dropout。",
        "output",
        names=("attention_dropout_rate",),
        megatron=0.1,
        yaml_names=("attention_dropout_rate",),
        checkpoint=TAKEN,
    )
    hidden_dropout: Probability = field(
        0.0,
        "Dropout on the outputs of attention, feed-forward and embedding.",
        "注意力、前馈和词嵌入输出的dropout。",
        "output",
        names=("hidden_dropout_rate",),
        megatron=0.1,
        yaml_names=("hidden_dropout_rate",),
        checkpoint=TAKEN,
    )
    untie_embeddings_and_output_weights: Bool = field(
        False, "The head has a weight of its own.", "输出头使用独立的权重。", "parameters", checkpoint=COMPARED
    )
    transformer_impl: one_of("local") = field(
        "local", "Implementation of the layers.", "层的实现方式。", "error", megatron=None, convert=conversions.transformer_impl
    )
