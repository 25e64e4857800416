"""z-scores of the loss and of the gradient norm, by which updates are skipped."""

from typing import Annotated

from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability, When

Z_SCORE = Bounds(0, at_most=11, also=": none of 128 values has a z-score above 11.3")


class OptimizerFields:
    skip_loss_z: Annotated[
        float, "skip updates whose loss has a larger z-score among the last 128 steps; 0: none", Z_SCORE
    ] = 0.0
    skip_grad_norm_z: Annotated[
        float, "skip updates whose gradient norm has a larger z-score among the last 128 steps; 0: none", Z_SCORE
    ] = 0.0


OPTIONS = ("optimizer.skip_loss_z", "optimizer.skip_grad_norm_z", "log.show")
CAPABILITY = Capability(
    optimizer_fields=("dtgpt.optim.z_scores:OptimizerFields",),
    step_states=(When("dtgpt.optim.z_scores.detector:make_detector", OPTIONS),),
    entries={"outliers": "dtgpt.optim.z_scores.detector:check_state"},
)
