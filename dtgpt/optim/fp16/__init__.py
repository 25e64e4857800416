"""Runs in fp16: the loss scale that keeps their gradients in its range."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    sections={"loss_scale": "dtgpt.optim.fp16.config:LossScaleConfig"},
    recipe_notes=("dtgpt.optim.fp16.config:NOTES",),
    step_states=(When("dtgpt.optim.fp16.loss_scale:make_scaler", ("precision=fp16",)),),
    entries={"loss_scale": "dtgpt.optim.fp16.loss_scale:check_state"},
)
