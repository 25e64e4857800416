"""Log-probabilities of the tokens of a prompt."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    options=("dtgpt.inference.scores.options:ScoreOptions",),
    engines=("dtgpt.inference.scores.prompts:ScoringEngine",),
    rank_commands=("dtgpt.inference.scores.prompts:read_and_score",),
)
