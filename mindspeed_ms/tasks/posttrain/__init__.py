"""Post-training on the machinery of pretraining: supervised fine-tuning, preferences, reward models."""
