"""z-scores of the loss and of the gradient norm, by which updates are skipped."""

from dtgpt.util.seams import Capability, When

OPTIONS = ("optimizer.skip_loss_z", "optimizer.skip_grad_norm_z", "log.show")
CAPABILITY = Capability(
    step_states=(When("dtgpt.optim.z_scores.detector:make_detector", OPTIONS),),
    entries={"outliers": "dtgpt.optim.z_scores.detector:check_state"},
)
