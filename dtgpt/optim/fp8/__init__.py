"""Runs whose matrix products are of 8 bits: the precision, and the scales of a step."""

from dtgpt.util.seams import Capability

NAME = "fp8"  # of the precision
CAPABILITY = Capability(
    precisions={NAME: "dtgpt.config.fp8:PRECISION"},
    step_states=("dtgpt.optim.fp8:make_scales",),
    entries={"fp8_exponents": "dtgpt.optim.fp8.scales:check_state"},
)


def make_scales(recipe, settings, mesh):
    """Return the scales of a run in fp8; None in any other."""
    if settings.products != NAME:
        return None
    from dtgpt.optim.fp8.scales import Fp8Scales

    return Fp8Scales(settings.model, mesh)
