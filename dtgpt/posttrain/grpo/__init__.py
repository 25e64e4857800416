"""Training on the model's own answers and their rewards (GRPO)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"grpo": "dtgpt.posttrain.grpo.config:GrpoConfig"},
    sharings=("dtgpt.ops.attention.shared:shared_tokens",),
    objectives={"grpo.group": "dtgpt.posttrain.grpo.objective:Reinforcement"},
)
