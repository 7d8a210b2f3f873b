"""Post-training: supervised fine-tuning, preferences, reward models, on the machinery of pretraining (docs/post-training.md)."""
