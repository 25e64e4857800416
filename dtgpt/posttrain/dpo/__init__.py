"""Training on pairs of answers, of which one is preferred (DPO)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    datasets=("dtgpt.posttrain.dpo.format:PAIR_TOKENS",),
    encoders={"preferences": "dtgpt.posttrain.dpo.preferences:PAIRS"},
    sections={"dpo": "dtgpt.posttrain.dpo.config:DpoConfig"},
    objectives={"dpo.beta": "dtgpt.posttrain.dpo.objective:Preferences"},
)
