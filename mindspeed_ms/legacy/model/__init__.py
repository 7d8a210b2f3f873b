"""Megatron's legacy model tree: GPTModel, its language model, and the parts of its transformer."""

from mindspeed_ms.legacy.model.eos_mask import EosMask
from mindspeed_ms.legacy.model.gpt_model import GPTModel
from mindspeed_ms.legacy.model.language_model import Embedding, TransformerLanguageModel, get_language_model
from mindspeed_ms.legacy.model.loss_func import LossWithMask
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.transformer import *  # noqa: F403
