"""The scales of a run whose matrix products are of 8 bits."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    step_states=("dtgpt.optim.fp8:make_scales",),
    entries={"fp8_exponents": "dtgpt.optim.fp8.scales:check_state"},
)


def make_scales(recipe, settings, mesh):
    """Return the scales of a run in fp8; None in any other."""
    if not settings.fp8:
        return None
    from dtgpt.optim.fp8.scales import Fp8Scales

    return Fp8Scales(settings.model, mesh)
