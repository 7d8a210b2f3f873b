"""Post-training on the machinery of pretraining: supervised fine-tuning, preferences (DPO, SimPO), reward models, PPO and GRPO."""
