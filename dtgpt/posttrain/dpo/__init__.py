"""Training on pairs of answers, of which one is preferred (DPO)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"dpo": "dtgpt.posttrain.dpo.config:DpoConfig"},
    objectives={"dpo.beta": "dtgpt.posttrain.dpo.objective:Preferences"},
)
