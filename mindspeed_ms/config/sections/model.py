"""``model_config``: shape, numbers and layers of the model."""

from typing import ClassVar

from mindspeed_ms.config.sections.attention import FlashAttentionConfig, RopeScalingConfig
from mindspeed_ms.config.sections.base import Section, field, is_collecting, link
from mindspeed_ms.config.sections.dataset import DatasetConfig
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.config.sections.moe import MoEConfig
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.sections.training import TrainingConfig
from mindspeed_ms.config.values import (
    Bool,
    Dtype,
    Free,
    NotNegative,
    PositiveFloat,
    PositiveInt,
    Probability,
    integer,
    number,
    one_of,
)
from mindspeed_ms.layout.describers import kinds
from mindspeed_ms.layout.model_description import GATED_ACTIVATIONS, NORMALIZATIONS

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_erf", "fast_gelu", "swiglu", "fused_swiglu", "silu", "relu", "squared_relu")
POSITION_TYPES = ("absolute", "learned_absolute", "rope", "none")
_ROTARY = {
    "rotary_percent": "rotary_percent",
    "rotary_interleaved": "rotary_interleaved",
    "rotary_base": "rotary_base",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}


class TransformerConfig(Section):
    """The model.

    ``TransformerConfig(vocab_size, num_layers, num_attention_heads, hidden_size, ffn_hidden_size, parallel_config,
    training_config, lora_config=..., dataset_config=..., moe_config=..., **fields)``; sections not given get their
    defaults. ``parallel_config`` etc. are shared by identity.
    """

    config_name: ClassVar[str] = "model_config"
    spellings: ClassVar[dict[str, str]] = {
        "attention_dropout_rate": "attention_dropout",
        "hidden_dropout_rate": "hidden_dropout",
        "padded_vocab_size": "vocab_size",
        "use_flash_attn": "use_flash_attention",
        "add_qkv_bias": "qkv_has_bias",
        "add_dense_bias": "out_proj_has_bias",
        "embedding_dtype": "embedding_init_dtype",
        "use_rotary_embedding": "use_rotary_position_embeddings",
        "fp8": "fp8_format",
    }
    groups: ClassVar[dict[str, dict[str, str]]] = {"rotary_config": _ROTARY}

    vocab_size: PositiveInt = field(
        ..., "Vocabulary size of the embedding table, padding included.", "词嵌入表的词汇量（含填充）。"
    )
    num_layers: integer(gt=0, le=10000) = field(..., "Number of transformer layers.", "Transformer层数。")
    num_attention_heads: PositiveInt = field(..., "Number of attention heads.", "注意力头数。")
    hidden_size: PositiveInt = field(..., "Width of the hidden states.", "隐藏状态的宽度。")
    ffn_hidden_size: PositiveInt = field(..., "Width inside the feed-forward block.", "前馈网络的内部宽度。")
    seq_length: PositiveInt = field(..., "Tokens per sample.", "每个样本的token数。")
    max_position_embeddings: PositiveInt | None = field(
        None,
        "Rows of a learned position table; at least seq_length.",
        "可学习位置表的行数，不小于seq_length。",
        derived="seq_length",
    )
    make_vocab_size_divisible_by: PositiveInt = field(
        128, "A computed vocabulary size is padded to a multiple of this times tp.", "计算词汇量时填充到该数乘tp的倍数。"
    )

    attention_type: one_of(*kinds("attention")) = field("self_attn", "Kind of attention.", "注意力的种类。")
    group_query_attention: Bool = field(False, "Several query heads share one key/value head.", "多个查询头共用一组键值头。")
    num_query_groups: PositiveInt | None = field(
        32,
        "Number of key/value groups under group_query_attention.",
        "分组查询注意力的键值组数。",
        derived="num_attention_heads without group_query_attention or for null",
    )
    kv_channels: PositiveInt | None = field(
        None, "Width of one attention head.", "单个注意力头的宽度。", derived="hidden_size / num_attention_heads"
    )
    qkv_has_bias: Bool = field(True, "Query, key and value projections have a bias.", "QKV投影带偏置。")
    out_proj_has_bias: Bool = field(True, "The attention output projection has a bias.", "注意力输出投影带偏置。")
    mlp_has_bias: Bool = field(False, "The feed-forward projections have a bias.", "前馈投影带偏置。")
    add_bias_linear: Bool = field(False, "All linear layers have a bias.", "所有线性层带偏置。")
    apply_query_key_layer_scaling: Bool = field(
        False,
        "Divide attention scores by the layer number before, and multiply inside, the fp32 softmax.",
        "按层号缩放注意力分数，并在fp32 softmax内还原。",
    )
    qk_layernorm: Bool = field(False, "Normalise queries and keys of each head.", "对每个头的Q、K做归一化。")
    attention_softmax_in_fp32: Bool = field(
        True, "Attention softmax in fp32.", "注意力softmax使用fp32。", derived="softmax_compute_dtype, if that is given"
    )
    mask_func_type: one_of("attn_mask_add", "attn_mask_fill") = field(
        "attn_mask_add", "How a mask enters the scores: added, or filled in.", "掩码作用于分数的方式：相加或填充。"
    )
    use_flash_attention: Bool = field(
        False, "Fused attention that holds no [s, s] matrix.", "使用不存放[s, s]矩阵的融合注意力。"
    )
    fa_config: FlashAttentionConfig = field(
        FlashAttentionConfig, "Settings of the fused attention operator.", "融合注意力算子的设置。"
    )
    enable_flash_sp: Bool = field(
        False, "Upstream's joint operator of attention and sequence parallelism.", "上游的注意力与序列并行合并算子。"
    )
    multi_latent_attention: Bool = field(
        False, "DeepSeek's attention with compressed keys and values.", "DeepSeek的压缩KV注意力。"
    )

    position_embedding_type: one_of(*POSITION_TYPES) = field(
        "absolute",
        "Positions: absolute (= learned_absolute), rope, or none.",
        "位置编码：absolute（即可学习绝对位置）、rope或none。",
    )
    add_position_embedding: Bool = field(True, "Add the learned positions to the embedding.", "在词嵌入上加可学习位置。")
    parallel_position_embedding: Bool = field(
        False, "Cut the learned position table over tensor parallel ranks.", "将可学习位置表切到张量并行rank上。"
    )
    use_rotary_position_embeddings: Bool = field(
        False, "Older flag for position_embedding_type rope.", "position_embedding_type为rope的旧写法。"
    )
    rotary_base: PositiveFloat = field(10000.0, "Base period of rotary positions.", "旋转位置编码的基本周期。")
    rotary_percent: number(gt=0, le=1) = field(1.0, "Share of a head's width that is rotated.", "头宽度中参与旋转的比例。")
    rotary_interleaved: Bool = field(False, "Rotate neighbouring pairs instead of halves.", "旋转相邻元素对而不是前后两半。")
    rotary_seq_len_interpolation_factor: PositiveFloat | None = field(
        None, "Positions are divided by this factor.", "位置除以该系数（线性插值）。"
    )
    rope_scaling: RopeScalingConfig | None = field(
        None, "Scaling of rotary frequencies for long sequences.", "长序列的旋转频率缩放。"
    )
    apply_rope_fusion: Bool = field(False, "Use the fused rotary operator.", "使用融合的旋转位置算子。")

    hidden_act: one_of(*ACTIVATIONS) = field("gelu", "Activation of the feed-forward block.", "前馈网络的激活函数。")
    gated_linear_unit: Bool = field(False, "The feed-forward block has a gate.", "前馈网络带门控。", derived="hidden_act")
    apply_swiglu_fusion: Bool = field(False, "Use the fused swiglu operator.", "使用融合的swiglu算子。")
    bias_gelu_fusion: Bool = field(False, "Fused bias and gelu: the tanh form of gelu.", "偏置与gelu融合，使用tanh形式的gelu。")
    bias_swiglu_fusion: Bool = field(False, "Fused bias and swiglu; same numbers.", "偏置与swiglu融合，数值相同。")

    normalization: one_of(*NORMALIZATIONS) = field("LayerNorm", "Norm layers.", "归一化层的种类。")
    norm_epsilon: PositiveFloat = field(1e-5, "Epsilon of the norms.", "归一化的epsilon。")
    apply_layernorm_1p: Bool = field(False, "Norm weights are stored minus one.", "归一化权重以减一的形式存放。")
    use_sandwich_norm: Bool = field(
        False, "A second norm after attention and after feed-forward.", "在注意力和前馈之后再加一次归一化。"
    )
    attn_post_norm_scale: Probability = field(
        1.0, "Initial weight of the norm after attention.", "注意力之后归一化的初始权重。"
    )
    ffn_post_norm_scale: Probability = field(
        1.0, "Initial weight of the norm after feed-forward.", "前馈之后归一化的初始权重。"
    )
    apply_residual_connection_post_norm: Bool = field(
        False, "The residual is taken after the norm instead of before.", "残差取自归一化之后而不是之前。"
    )
    use_final_norm: Bool = field(True, "Norm after the last layer.", "最后一层之后做归一化。")
    residual_connection_dtype: Dtype | None = field(
        None,
        "Data type of the residual stream.",
        "残差流的数据类型。",
        derived="float32 with fp32_residual_connection, else compute_dtype",
    )
    fp32_residual_connection: Bool = field(False, "Keep the residual stream in fp32.", "残差流保持fp32。")

    init_method_std: NotNegative = field(0.01, "Standard deviation of the normal initialisation.", "正态初始化的标准差。")
    embedding_init_std: NotNegative | None = field(
        None, "Standard deviation for the embeddings.", "词嵌入初始化的标准差。", derived="init_method_std"
    )
    scaled_output_init: Bool = field(
        True, "Output projections start with std / sqrt(2 * num_layers).", "输出投影以std/sqrt(2*层数)初始化。"
    )
    init_method: Free = field("normal", "Initialiser of weights: a name or a number.", "权重初始化：名称或数值。")
    bias_init: Free = field("zeros", "Initialiser of biases: a name or a number.", "偏置初始化：名称或数值。")

    params_dtype: Dtype = field("float32", "Data type of the parameters.", "参数的数据类型。")
    compute_dtype: Dtype | None = field(None, "Data type of the computation.", "计算的数据类型。", derived="params_dtype")
    softmax_compute_dtype: Dtype = field(
        "float32",
        "Data type of the attention softmax.",
        "注意力softmax的数据类型。",
        derived="float32 with attention_softmax_in_fp32, else compute_dtype",
    )
    embedding_init_dtype: Dtype = field(
        "float32", "Data type in which embedding weights are drawn.", "词嵌入初始化时的数据类型。"
    )
    fp16_lm_cross_entropy: Bool = field(False, "Cross entropy in fp16.", "交叉熵使用fp16。")
    label_smoothing: number(ge=0, lt=1) = field(0.0, "Share of the target spread over the vocabulary.", "标签平滑系数。")
    attention_dropout: Probability = field(0.0, "Dropout on attention weights.", "注意力权重的dropout。")
    hidden_dropout: Probability = field(
        0.0, "Dropout on the outputs of attention, feed-forward and embedding.", "注意力、前馈和词嵌入输出的dropout。"
    )
    untie_embeddings_and_output_weights: Bool = field(False, "The head has a weight of its own.", "输出头使用独立的权重。")
    transformer_impl: one_of("local") = field("local", "Implementation of the layers.", "层的实现方式。")

    recompute_granularity: one_of("full", "selective") | None = field(
        None, "What is recomputed in backward: whole layers or the core of attention.", "反向中重计算的内容：整层或注意力核心。"
    )
    recompute_method: one_of("uniform", "block") | None = field(
        None, "Full recomputation in equal groups of layers, or of the first layers.", "整层重计算：均匀分组，或只对前若干层。"
    )
    recompute_num_layers: PositiveInt | None = field(
        None, "Layers per group (uniform) or number of layers (block).", "每组层数（uniform）或层数（block）。"
    )
    distribute_saved_activations: Bool = field(
        False, "Cut checkpointed activations over tensor parallel ranks.", "把保存的激活切到张量并行rank上。"
    )

    bias_dropout_fusion: Bool = field(
        False, "Fused bias, dropout and residual; same numbers.", "偏置、dropout与残差融合，数值相同。"
    )
    masked_softmax_fusion: Bool = field(False, "Fused mask and softmax; same numbers.", "掩码与softmax融合，数值相同。")
    clone_scatter_output_in_embedding: Bool = field(
        False, "Copy the scattered embedding so that the whole one can be freed.", "复制切分后的词嵌入以释放完整的那份。"
    )
    fp8_format: one_of("e4m3", "hybrid") | None = field(None, "fp8 computation.", "fp8计算。")
    out_hidden_size: PositiveInt | None = field(None, "Output width of the last layer.", "最后一层的输出宽度。")
    num_experts: PositiveInt | None = field(None, "Second place of moe_config.num_experts.", "与moe_config.num_experts相同。")
    encoder_num_layers: PositiveInt | None = field(
        None, "Encoder layers of an encoder-decoder model.", "编码器层数（编解码模型）。"
    )
    decoder_num_layers: PositiveInt | None = field(
        None, "Decoder layers of an encoder-decoder model.", "解码器层数（编解码模型）。"
    )
    head_skip_weight_param_allocation: Bool = field(
        True,
        "Upstream's switch; the head of a tied model never allocates a weight.",
        "上游开关；共享权重时输出头从不分配权重。",
    )
    use_query_layer: Bool = field(False, "PanGu's query layer.", "盘古的query层。")
    use_visual_encoder: Bool = field(False, "Visual encoder.", "视觉编码器。")
    use_retriever: Bool = field(False, "Retrieval inputs.", "检索输入。")
    retro_add_retriever: Bool = field(False, "Retro model.", "Retro模型。")
    flatten_labels_and_input_mask: Bool = field(
        True, "Upstream's switch; labels are used in either shape.", "上游开关；标签的两种形状都可用。"
    )

    parallel_config: ModelParallelConfig = link(ModelParallelConfig)
    training_config: TrainingConfig = link(TrainingConfig)
    lora_config: LoraConfig = link(LoraConfig)
    dataset_config: DatasetConfig = link(DatasetConfig)
    moe_config: MoEConfig = link(MoEConfig)

    def __init__(
        self,
        vocab_size=None,
        num_layers=None,
        num_attention_heads=None,
        hidden_size=None,
        ffn_hidden_size=None,
        parallel_config=None,
        training_config=None,
        **fields,
    ):
        if training_config is not None:
            parallel_config = parallel_config or training_config.parallel_config
            for name in ("dataset_config", "lora_config"):
                fields.setdefault(name, getattr(training_config, name))
        given = {
            "vocab_size": vocab_size,
            "num_layers": num_layers,
            "num_attention_heads": num_attention_heads,
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size,
            "parallel_config": parallel_config,
            "training_config": training_config,
        }
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **fields)

    @classmethod
    def rewrite(cls, values, problems):
        """``recompute_activations`` is Megatron's short form of selective recomputation."""
        values = dict(super().rewrite(values, problems))
        if values.pop("recompute_activations", None):
            values.setdefault("recompute_granularity", "selective")
        return values

    def derive(self):
        """Fill what follows from other fields; see each field's ``derived``."""
        given = self.model_fields_set
        half = "bfloat16" if self.training_config.bf16 else "float16" if self.training_config.fp16 else None
        if half and "params_dtype" not in given:
            self.fill(params_dtype=half)
        if self.compute_dtype is None:
            self.fill(compute_dtype=half or self.params_dtype)
        self._derive_residual(given)
        if "softmax_compute_dtype" not in given:
            self.fill(softmax_compute_dtype="float32" if self.attention_softmax_in_fp32 else self.compute_dtype)
        elif "attention_softmax_in_fp32" not in given:
            self.fill(attention_softmax_in_fp32=self.softmax_compute_dtype == "float32")
        if self.kv_channels is None:
            self.fill(kv_channels=self.hidden_size // self.num_attention_heads)
            if self.hidden_size % self.num_attention_heads and not is_collecting():
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not divisible by num_attention_heads = "
                    f"{self.num_attention_heads}; change one of them or set kv_channels"
                )
        if (not self.group_query_attention and "num_query_groups" not in given) or self.num_query_groups is None:
            self.fill(num_query_groups=self.num_attention_heads)
        if self.max_position_embeddings is None:
            self.fill(max_position_embeddings=self.seq_length)
        if self.embedding_init_std is None:
            self.fill(embedding_init_std=self.init_method_std)
        if "gated_linear_unit" not in given:
            self.fill(gated_linear_unit=self.hidden_act in GATED_ACTIVATIONS)
        if self.use_rotary_position_embeddings and "position_embedding_type" not in given:
            self.fill(position_embedding_type="rope")
        if self.position_embedding_type == "absolute":
            self.fill(position_embedding_type="learned_absolute")
        if self.parallel_config.recv_dtype is None:
            self.parallel_config.fill(recv_dtype=self.residual_connection_dtype)

    def _derive_residual(self, given):
        if self.residual_connection_dtype is None:
            self.fill(residual_connection_dtype="float32" if self.fp32_residual_connection else self.compute_dtype)
        elif "fp32_residual_connection" not in given:
            self.fill(fp32_residual_connection=self.residual_connection_dtype == "float32" != self.compute_dtype)

    @property
    def rotary_config(self):
        """dict of the rotary settings in upstream's grouping."""
        return {name: getattr(self, target) for name, target in _ROTARY.items()}

    @property
    def gelu_approximation(self):
        """ "tanh" if gelu runs fused with a bias, as in Megatron, else "none" (erf)."""
        has_bias = self.add_bias_linear or self.mlp_has_bias
        return "tanh" if self.bias_gelu_fusion and has_bias else "none"
