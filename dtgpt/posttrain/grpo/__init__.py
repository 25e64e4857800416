"""Training on the model's own answers and their rewards (GRPO)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"grpo": "dtgpt.posttrain.grpo.config:GrpoConfig"},
    objectives={"grpo.group": "dtgpt.posttrain.grpo.objective:Reinforcement"},
)
