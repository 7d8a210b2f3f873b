"""Megatron's legacy model tree. The documented classes are also importable from here, on first use."""

import importlib

_HOMES = {
    "EosMask": "eos_mask",
    "GPTModel": "gpt_model",
    "LossWithMask": "loss_func",
    "Module": "module",
    "Embedding": "language_model",
    "TransformerLanguageModel": "language_model",
    "get_language_model": "language_model",
    **dict.fromkeys(
        (
            "AttnMaskType",
            "AttnType",
            "CoreAttention",
            "FlashAttention",
            "FusedRMSNorm",
            "LayerNorm",
            "LayerType",
            "ModelType",
            "ParallelAttention",
            "ParallelLMLogits",
            "ParallelMLP",
            "ParallelTransformer",
            "ParallelTransformerLayer",
            "RMSNorm",
            "RotaryEmbedding",
            "get_norm",
        ),
        "transformer",
    ),
}

__all__ = sorted(_HOMES)


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
