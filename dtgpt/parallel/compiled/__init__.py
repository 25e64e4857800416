"""Blocks that torch.compile compiles."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    compilers=("dtgpt.parallel.compiled.choice:choose_compiler",),
    build=(When("dtgpt.parallel.compiled.blocks:COMPILATION", ("settings.compile",)),),
    plan_rules=(When("dtgpt.parallel.compiled.choice:PLAN_RULES", ("compile=on",)),),
)
