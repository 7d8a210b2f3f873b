"""Inference: key-value cache, model runner, loading of checkpoints for generation and scoring."""
