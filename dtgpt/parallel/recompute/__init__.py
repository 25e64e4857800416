"""Activations that are computed again in backward, and not kept."""

from dtgpt.util.seams import Capability, When

CORES, BLOCKS = "dtgpt.parallel.recompute.blocks:CORES", "dtgpt.parallel.recompute.blocks:BLOCKS"
CAPABILITY = Capability(
    build=(
        When(CORES, ("settings.recompute=selective",)),
        When(BLOCKS, ("settings.recompute=full", "settings.recompute=around_attention")),
    ),
    recomputes={"selective": CORES, "around_attention": BLOCKS, "full": BLOCKS},
    plan_rules=(When("dtgpt.parallel.recompute.rules:PLAN_RULES", ("recompute_blocks", "recompute=around_attention")),),
    settings_rules=(When("dtgpt.parallel.recompute.rules:SETTINGS_RULES", ("recompute=around_attention",)),),
)
