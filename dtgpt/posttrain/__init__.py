"""Tuning a trained model: chats, LoRA, DPO and GRPO, each with its config, checks, data and objective."""
