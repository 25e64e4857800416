"""Log-probabilities of the tokens of a prompt."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(scorers=("dtgpt.inference.scores.prompts:SCORER",))
