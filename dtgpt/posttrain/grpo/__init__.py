"""Training on the model's own answers and their rewards (GRPO)."""
