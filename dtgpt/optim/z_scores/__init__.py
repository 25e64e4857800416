"""z-scores of the loss and of the gradient norm, by which updates are skipped."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    step_states=("dtgpt.optim.z_scores:make_detector",),
    entries={"outliers": "dtgpt.optim.z_scores.detector:check_state"},
)


def make_detector(recipe, settings, mesh):
    """Return what measures z-scores, where updates are skipped by them or they are shown; else None."""
    own = recipe.optimizer
    if not (own.skip_loss_z or own.skip_grad_norm_z or "z" in recipe.log.show.split(",")):
        return None
    from dtgpt.optim.z_scores.detector import OutlierDetector

    return OutlierDetector(mesh, own)
