"""Post-training on the machinery of pretraining: SFT, preferences (DPO, SimPO), reward models, PPO and GRPO."""
