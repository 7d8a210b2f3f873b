"""`moe_config`: mixture of experts."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import COMPARED, SWITCH, TAKEN, Alias, field
from mindspeed_ms.config.values import Bool, Count, Float, LayerPattern, NotNegative, PositiveFloat, PositiveInt, one_of

_SAME_NUMBERS = (
    "it changes how the same numbers are computed; the fastest way is taken",
    "只改变相同数值的计算方式，本框架自行取最快者",
)


class MoEConfig(Section):
    """`moe_config`: mixture of experts."""

    config_name: ClassVar[str] = "moe_config"

    num_experts: PositiveInt = field(
        1, "Number of experts; 1 is a dense model.", "专家数，1表示稠密模型。", "parameters", megatron=None, checkpoint=COMPARED
    )
    moe_ffn_hidden_size: PositiveInt | None = field(
        None,
        "Width inside one expert; null takes ffn_hidden_size.",
        "单个专家的内部宽度，空表示ffn_hidden_size。",
        "parameters",
        also=("--moe-intermediate-size",),
        convert=conversions.moe_ffn_hidden_size,
        checkpoint=COMPARED,
    )
    moe_grouped_gemm: Bool = field(
        False, "All experts in one grouped matrix product.", "所有专家合并为一次分组矩阵乘。", "operators"
    )
    moe_router_topk: PositiveInt = field(2, "Experts per token.", "每个token选择的专家数。", "output", checkpoint=COMPARED)
    moe_router_load_balancing_type: one_of("aux_loss", "seq_aux_loss", "sinkhorn", "none") = field(
        "none",
        "How the router is kept balanced.",
        "路由负载均衡的方式。",
        "output",
        megatron="aux_loss",
        convert=conversions.load_balancing,
    )
    moe_router_score_function: one_of("softmax", "sigmoid") = field(
        "softmax", "Function on the router's logits.", "路由分数函数。", "output", checkpoint=COMPARED
    )
    moe_router_pre_softmax: Bool = field(
        False, "Softmax over all experts before top-k.", "先对全部专家做softmax再取top-k。", "output", checkpoint=COMPARED
    )
    moe_router_dtype: one_of("fp32", "fp64") | None = field(
        None,
        "Data type of the router.",
        "路由计算的数据类型。",
        "output",
        aliases=(
            Alias("router_gating_in_fp32", "The same as moe_router_dtype fp32.", "等同moe_router_dtype: fp32。", value="fp32"),
        ),
    )
    moe_router_has_bias: Bool = field(
        False,
        "The router's linear layer has a bias (gpt-oss).",
        "路由线性层带偏置（gpt-oss）。",
        "parameters",
        form=SWITCH,
        checkpoint=TAKEN,
    )
    moe_router_num_groups: PositiveInt | None = field(
        None,
        "Groups of experts for group-limited routing.",
        "分组路由的专家组数。",
        "output",
        also=("--n-group",),
        checkpoint=COMPARED,
    )
    moe_router_group_topk: PositiveInt | None = field(
        None, "Groups chosen per token.", "每个token选择的专家组数。", "output", also=("--topk-group",), checkpoint=COMPARED
    )
    moe_router_group_score_topk: PositiveInt | None = field(
        None,
        "Experts of a group whose scores sum to the group's; null is moe_router_topk / moe_router_group_topk, as Megatron.",
        "组分数由组内多少个最高分专家相加；空表示moe_router_topk除以moe_router_group_topk，与Megatron相同。",
        "output",
        checkpoint=COMPARED,
    )
    moe_router_topk_scaling_factor: PositiveFloat | None = field(
        None,
        "Factor on the chosen probabilities.",
        "所选概率的缩放系数。",
        "output",
        also=("--routed-scaling-factor",),
        checkpoint=COMPARED,
    )
    moe_router_enable_expert_bias: Bool = field(
        False, "Balance by a bias per expert without loss.", "用专家偏置实现无损失的均衡。", "output", checkpoint=TAKEN
    )
    moe_router_bias_update_rate: NotNegative = field(0.001, "Step of the expert bias.", "专家偏置的更新步长。", "output")
    norm_topk_prob: Bool = field(
        False,
        "Normalise the chosen probabilities to sum 1 (Qwen, DeepSeek).",
        "将所选概率归一化为和为1（Qwen、DeepSeek）。",
        "output",
        checkpoint=COMPARED,
    )
    moe_token_dispatcher_type: one_of("alltoall", "allgather", "alltoall_seq", "flex") = field(
        "alltoall",
        "How tokens travel to experts.",
        "token发送到专家的方式。",
        "operators",
        megatron="allgather",
        needs=("num_experts",),
    )
    use_self_defined_alltoall: Bool = field(
        False,
        "Upstream's own all-to-all; same numbers.",
        "上游自带的all-to-all，数值相同。",
        "log",
        form=SWITCH,
        ignored=_SAME_NUMBERS,
    )
    moe_expert_capacity_factor: Float | None = field(
        None,
        "Tokens per expert relative to an even share; negative or null drops none.",
        "专家容量系数；负数或空表示不丢弃。",
        "output",
    )
    moe_pad_expert_input_to_capacity: Bool = field(
        False, "Pad every expert's input to its capacity.", "把每个专家的输入填充到容量。", "operators"
    )
    moe_token_drop_policy: one_of("probs", "position") = field(
        "probs", "Which tokens are dropped over capacity.", "超出容量时丢弃哪些token。", "output"
    )
    moe_aux_loss_coeff: NotNegative = field(0.0, "Weight of the balance loss.", "均衡损失的系数。", "optimizer")
    moe_z_loss_coeff: NotNegative | None = field(None, "Weight of the z-loss.", "z-loss的系数。", "optimizer")
    moe_input_jitter_eps: NotNegative | None = field(None, "Noise on the router's input.", "路由输入的噪声幅度。", "output")
    moe_layer_freq: LayerPattern | None = field(
        None,
        "Every n-th layer is an expert layer, or a list of 0/1 per layer; null makes all.",
        "每隔n层一个专家层，或逐层0/1列表；空表示全部。",
        "parameters",
        megatron=None,
        convert=conversions.moe_layer_freq,
        checkpoint=TAKEN,
    )
    first_k_dense_replace: Count | None = field(
        None,
        "The first k layers stay dense (DeepSeek).",
        "前k层保持稠密（DeepSeek）。",
        "parameters",
        convert=conversions.first_k_dense,
        checkpoint=TAKEN,
    )
    moe_shared_expert_intermediate_size: PositiveInt | None = field(
        None, "Width inside the shared experts.", "共享专家的内部宽度。", "parameters", checkpoint=TAKEN
    )
    n_shared_experts: PositiveInt | None = field(
        None, "Number of shared experts (DeepSeek).", "共享专家数（DeepSeek）。", "parameters", checkpoint=TAKEN
    )
    moe_shared_expert_gate: Bool = field(
        False,
        "The output of the shared experts has a gate of its own (Qwen2-MoE).",
        "共享专家的输出带独立门控（Qwen2-MoE）。",
        "parameters",
        also=("--moe-use-shared-expert-gate",),
        checkpoint=TAKEN,
    )
    moe_shared_expert_overlap: Bool = field(
        False, "Overlap shared experts with dispatching.", "共享专家与分发通信重叠。", "operators"
    )
    moe_permute_fusion: Bool = field(
        False,
        "Fused permutation of tokens; same numbers.",
        "融合的token重排，数值相同。",
        "log",
        also=("--use-fused-moe-token-permute-and-unpermute", "--moe-permutation-async-comm"),
        ignored=_SAME_NUMBERS,
    )
    moe_per_layer_logging: Bool = field(False, "Log the balance loss of every layer.", "逐层记录均衡损失。", "log")
    moe_layer_recompute: Bool = field(False, "Recompute expert layers in backward.", "反向中重计算专家层。", "operators")
    moe_extended_tp: Bool = field(
        False,
        "Spread whole experts over tensor parallel ranks: expert_tensor_parallel_size 1.",
        "把完整的专家分布到张量并行rank上，即expert_tensor_parallel_size为1。",
        "layout",
        also=("--moe-tp-extend-ep",),
    )

    def derive(self):
        """Fill derived fields: a negative capacity factor means none, as upstream."""
        if self.moe_expert_capacity_factor is not None and self.moe_expert_capacity_factor < 0:
            self.fill(moe_expert_capacity_factor=None)
