"""`model_config`: shape, numbers and layers of the model."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.attention import AttentionFields
from mindspeed_ms.config.sections.base import Section, is_collecting
from mindspeed_ms.config.sections.dataset import DatasetConfig
from mindspeed_ms.config.sections.field import COMPARED, OFF, SWITCH, TAKEN, YAML_ONLY, Alias, field, link
from mindspeed_ms.config.sections.latent_attention import LatentAttentionFields
from mindspeed_ms.config.sections.layers import SAME_NUMBERS, LayerFields
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.config.sections.moe import MoEConfig
from mindspeed_ms.config.sections.parallel import ModelParallelConfig
from mindspeed_ms.config.sections.position import PositionFields
from mindspeed_ms.config.sections.training import TrainingConfig
from mindspeed_ms.config.values import Bool, Count, NotNegative, PositiveInt, integer, one_of
from mindspeed_ms.layout.model_description import GATED_ACTIVATIONS

_NO_ENCODER = ("there are decoder-only models here", "本框架只有仅解码器模型")
_NO_RETRO = ("retrieval models are not part of this framework", "本框架不含检索模型")
_ROTARY = {
    "rotary_percent": "rotary_percent",
    "rotary_interleaved": "rotary_interleaved",
    "rotary_base": "rotary_base",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}


class SizeFields(Section):
    """Sizes of the model."""

    vocab_size: PositiveInt = field(
        ...,
        "Vocabulary size of the embedding table, padding included.",
        "词嵌入表的词汇量（含填充）。",
        "parameters",
        name="padded_vocab_size",
        megatron=None,
        yaml_names=("padded_vocab_size",),
    )
    num_layers: integer(gt=0, le=10000) = field(
        ..., "Number of transformer layers.", "Transformer层数。", "parameters", megatron=None, checkpoint=TAKEN
    )
    hidden_size: PositiveInt = field(
        ..., "Width of the hidden states.", "隐藏状态的宽度。", "parameters", megatron=None, checkpoint=COMPARED
    )
    num_attention_heads: PositiveInt = field(
        ..., "Number of attention heads.", "注意力头数。", "output", megatron=None, checkpoint=COMPARED
    )
    ffn_hidden_size: PositiveInt = field(
        ...,
        "Width inside the feed-forward block.",
        "前馈网络的内部宽度。",
        "parameters",
        megatron=None,
        note=(
            "from arguments its default is 4 * hidden_size, or int(8/3 * hidden_size / 64) * 64 with --swiglu",
            "参数方式下默认4*hidden_size，--swiglu时为int(8/3*hidden_size/64)*64",
        ),
        checkpoint=COMPARED,
    )
    seq_length: PositiveInt = field(..., "Tokens per sample.", "每个样本的token数。", "data", megatron=None)
    max_position_embeddings: PositiveInt | None = field(
        None,
        "Rows of a learned position table; at least seq_length.",
        "可学习位置表的行数，不小于seq_length。",
        "parameters",
        derived="seq_length",
        checkpoint=TAKEN,
    )
    make_vocab_size_divisible_by: PositiveInt = field(
        128,
        "A computed vocabulary size is padded to a multiple of this times tp.",
        "计算词汇量时填充到该数乘tp的倍数。",
        "parameters",
    )


class TransformerConfig(LayerFields, PositionFields, LatentAttentionFields, AttentionFields, SizeFields):
    """`model_config`: sizes, layers, attention and numerics of the model.

    `TransformerConfig(vocab_size, num_layers, num_attention_heads, hidden_size, ffn_hidden_size, parallel_config,
    training_config, lora_config=..., dataset_config=..., moe_config=..., **fields)`; sections not given get their
    defaults. `parallel_config` etc. are shared by identity.
    """

    config_name: ClassVar[str] = "model_config"
    groups: ClassVar[dict[str, dict[str, str]]] = {"rotary_config": _ROTARY}

    recompute_granularity: one_of("full", "selective") | None = field(
        None,
        "What is recomputed in backward: whole layers or the core of attention.",
        "反向中重计算的内容：整层或注意力核心。",
        "operators",
        aliases=(
            Alias(
                "recompute_activations",
                "The same as recompute_granularity selective.",
                "等同recompute_granularity: selective。",
                value="selective",
            ),
        ),
    )
    loss_chunk_size: PositiveInt | None = field(
        None,
        "Tokens whose logits exist at a time in the loss; null: all. The backward computes them again.",
        "损失计算中同时存在logits的token数，空表示全部；反向中重新计算。",
        "operators",
    )
    mlp_chunk_size: PositiveInt | None = field(
        None,
        "Tokens inside a dense feed-forward block at a time; null: all. The backward computes them again.",
        "稠密前馈层中同时计算的token数，空表示全部；反向中重新计算。",
        "operators",
    )
    recompute_method: one_of("uniform", "block") | None = field(
        None,
        "Full recomputation in equal groups of layers, or of the first layers.",
        "整层重计算：均匀分组，或只对前若干层。",
        "operators",
    )
    recompute_num_layers: PositiveInt | None = field(
        None, "Layers per group (uniform) or number of layers (block).", "每组层数（uniform）或层数（block）。", "operators"
    )
    mtp_num_layers: Count | None = field(
        None,
        "Further tokens that each position predicts in training, with a layer for each (multi-token prediction).",
        "训练中每个位置额外预测的token数，每个对应一层（多token预测，MTP）。",
        "parameters",
        checkpoint=TAKEN,
    )
    mtp_loss_scaling_factor: NotNegative = field(
        0.1,
        "Weight of the mean loss of the further tokens (multi-token prediction).",
        "多token预测（MTP）平均损失的权重。",
        "optimizer",
    )
    distribute_saved_activations: Bool = field(
        False, "Cut checkpointed activations over tensor parallel ranks.", "把保存的激活切到张量并行rank上。", "memory"
    )

    bias_dropout_fusion: Bool = field(
        False,
        "Fused bias, dropout and residual; same numbers.",
        "偏置、dropout与残差融合，数值相同。",
        "log",
        form=OFF,
        megatron=True,
        ignored=SAME_NUMBERS,
    )
    masked_softmax_fusion: Bool = field(
        False,
        "Fused mask and softmax; same numbers.",
        "掩码与softmax融合，数值相同。",
        "log",
        form=OFF,
        megatron=True,
        ignored=SAME_NUMBERS,
    )
    clone_scatter_output_in_embedding: Bool = field(
        False,
        "Copy the scattered embedding so that the whole one can be freed.",
        "复制切分后的词嵌入以释放完整的那份。",
        "log",
        form=OFF,
        megatron=True,
        ignored=("the scattered embedding is a tensor of its own in any case", "切分后的词嵌入本就是独立张量"),
    )
    fp8_format: one_of("e4m3", "hybrid") | None = field(
        None,
        "fp8 computation.",
        "fp8计算。",
        "error",
        names=("fp8",),
        refused=("there is no fp8 computation here", "本框架没有fp8计算"),
        yaml_names=("fp8",),
    )
    out_hidden_size: PositiveInt | None = field(
        None,
        "Output width of the last layer.",
        "最后一层的输出宽度。",
        "error",
        refused=("the last layer is as wide as the others", "最后一层与其他层同宽"),
    )
    num_experts: PositiveInt | None = field(
        None,
        "Second place of moe_config.num_experts.",
        "与moe_config.num_experts相同。",
        "parameters",
        name=YAML_ONLY,
        checkpoint=TAKEN,
    )
    encoder_num_layers: PositiveInt | None = field(
        None,
        "Encoder layers of an encoder-decoder model.",
        "编码器层数（编解码模型）。",
        "error",
        convert=conversions.encoder_num_layers,
        refused=_NO_ENCODER,
    )
    decoder_num_layers: PositiveInt | None = field(
        None, "Decoder layers of an encoder-decoder model.", "解码器层数（编解码模型）。", "error", refused=_NO_ENCODER
    )
    head_skip_weight_param_allocation: Bool = field(
        True,
        "Upstream's switch; the head of a tied model never allocates a weight.",
        "上游开关；共享权重时输出头从不分配权重。",
        "log",
        form=SWITCH,
        ignored=("the head of a tied model never allocates a weight", "共享权重时输出头从不分配权重"),
    )
    use_query_layer: Bool = field(
        False,
        "PanGu's query layer.",
        "盘古的query层。",
        "error",
        form=SWITCH,
        refused=("the query layer is not part of this framework", "本框架没有query层"),
    )
    use_visual_encoder: Bool = field(
        False,
        "Visual encoder.",
        "视觉编码器。",
        "error",
        form=SWITCH,
        refused=("visual encoders are not part of this framework", "本框架没有视觉编码器"),
    )
    use_retriever: Bool = field(False, "Retrieval inputs.", "检索输入。", "error", form=SWITCH, refused=_NO_RETRO)
    retro_add_retriever: Bool = field(False, "Retro model.", "Retro模型。", "error", refused=_NO_RETRO)
    flatten_labels_and_input_mask: Bool = field(
        True,
        "Upstream's switch; labels are used in either shape.",
        "上游开关；标签的两种形状都可用。",
        "log",
        form=SWITCH,
        ignored=("labels and masks are used in either shape", "标签和掩码两种形状均可"),
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
        """Read `recompute_activations`, Megatron's short form of selective recomputation."""
        values = dict(super().rewrite(values, problems))
        if values.pop("recompute_activations", None):
            values.setdefault("recompute_granularity", "selective")
        return values

    def derive(self):
        """Fill derived fields; see each field's `derived`."""
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
        self.derive_latent_attention(given)
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
        """Rotary settings (dict) in upstream's grouping."""
        return {name: getattr(self, target) for name, target in _ROTARY.items()}

    @property
    def gelu_approximation(self):
        """Form of gelu: "tanh" if it runs fused with a bias, as in Megatron, else "none" (erf)."""
        has_bias = self.add_bias_linear or self.mlp_has_bias
        return "tanh" if self.bias_gelu_fusion and has_bias else "none"
