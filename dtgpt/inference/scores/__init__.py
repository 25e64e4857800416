"""Log-probabilities of the tokens of a prompt."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    scorers=("dtgpt.inference.scores.prompts:SCORER",), rank_commands=("dtgpt.inference.scores.prompts:read_and_score",)
)
