"""Shapes that the benchmarks time: models of 4 layers, hidden 512, 8 heads, seq 256, vocab 8192; a mixture of experts."""

SEED = 1234
LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, MICRO_BATCH = 4, 512, 8, 256, 8192, 2
SHAPES = {
    "llama": {"ffn": 1376, "norm": "RMSNorm", "activation": "swiglu", "rope": True, "bias": False, "tied": False},
    "gpt2": {"ffn": 2048, "norm": "LayerNorm", "activation": "gelu", "rope": False, "bias": True, "tied": True},
}
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
MOE = {"hidden": 512, "experts": 8, "topk": 2, "ffn": 704, "tokens": 1024}
"""The mixture of experts that `moe.py` and `peer_moe.py` time."""
