"""Tasks with known answers: scores of given tokens, procedures and data files."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(observers=("dtgpt.evaluation.observer:observe_tasks",))
