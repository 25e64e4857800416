"""Runs whose matrix products are of 8 bits: the precision, and the scales of a step."""

from dtgpt.util.seams import Capability, When

NAME = "fp8"  # of the precision
CAPABILITY = Capability(
    precisions={NAME: "dtgpt.optim.fp8.precision:PRECISION"},
    precision_help={NAME: "bf16, with the matrix products of blocks in 8 bits"},
    build=(When("dtgpt.optim.fp8.observed_blocks:OBSERVED", ("settings.products",)),),
    step_states=(When("dtgpt.optim.fp8.scales:make_scales", (f"precision={NAME}",)),),
    entries={"fp8_exponents": "dtgpt.optim.fp8.scales:check_state"},
)
