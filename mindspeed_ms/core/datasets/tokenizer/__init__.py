"""Tokenizers: one interface to Hugging Face, sentencepiece, GPT2 and number tokenizers. Nothing here imports MindSpore."""

from mindspeed_ms.core.datasets.tokenizer.build import build_tokenizer, model_vocab_size
from mindspeed_ms.core.datasets.tokenizer.interface import Tokenizer, TokenizerError
from mindspeed_ms.core.datasets.tokenizer.settings import TokenizerSettings

__all__ = ["Tokenizer", "TokenizerError", "TokenizerSettings", "build_tokenizer", "model_vocab_size"]
