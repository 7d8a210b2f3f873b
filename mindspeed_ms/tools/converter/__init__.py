"""Converter of checkpoints: Megatron, Hugging Face, ours and upstream's, any to any, in any layout."""
