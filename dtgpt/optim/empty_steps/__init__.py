"""Steps in which no token counts, as masks of documents or of prompts may leave them: they change no weight."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    step_states=("dtgpt.optim.empty_steps.state:make_counter",),
    entries={"empty_steps": "dtgpt.optim.empty_steps.state:check_state"},
)
