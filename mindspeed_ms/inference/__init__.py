"""Inference: loading, key-value cache, model runner, sampling, generation engine (continuous batching), beam search, chat."""
