"""Sides of a conversion, forms of experts and names of families, as the flags spell them."""

from mindspeed_ms.core.dist_checkpointing.megatron.names import EXPERT_FORMS

HUGGING_FACE, MEGATRON, NATIVE, UPSTREAM, GGUF = "hf", "mg", "native", "ckpt", "gguf"
EXPERTS = {form.replace("_", "-"): form for form in EXPERT_FORMS}
# names of MindSpeed-LLM for several families at once
WIDE_NAMES = {"llama2": ("llama", "mistral", "qwen2"), "qwen25": ("qwen2",), "qwen": ("qwen2",)}


def accepts_family(asked, found):
    """Whether `--model-type-hf` (or None) names the family `found`, alone or among others."""
    return asked is None or asked.replace("-", "_") == found or found in WIDE_NAMES.get(asked, ())
