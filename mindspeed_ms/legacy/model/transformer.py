"""Public names of the transformer's parts, as in Megatron's `transformer.py`."""

from mindspeed_ms.legacy.model.attention import ParallelAttention
from mindspeed_ms.legacy.model.core_attention import CoreAttention, FlashAttention
from mindspeed_ms.legacy.model.enums import AttnMaskType, AttnType, LayerType, ModelType
from mindspeed_ms.legacy.model.lm_logits import ParallelLMLogits
from mindspeed_ms.legacy.model.mlp import ParallelMLP
from mindspeed_ms.legacy.model.norms import FusedRMSNorm, LayerNorm, RMSNorm, get_norm
from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding, apply_rotary_pos_emb
from mindspeed_ms.legacy.model.transformer_block import ParallelTransformer
from mindspeed_ms.legacy.model.transformer_layer import ParallelTransformerLayer
