"""What a run cannot compute again, and which of its blocks it does."""

from dtgpt.config.execution import Recompute, Settings
from dtgpt.models.shared.attention_backend import scores_backend
from dtgpt.util.rules import Condition, Given, Is, Rule, Rules, Values

PLAN_RULES: Rules = (  # of a recipe under a `plan`
    Rule(
        "recompute_blocks={recompute_blocks}, but the schedule {plan.schedule} recomputes all blocks or none; leave it "
        "out or use another schedule",
        Given("recompute_blocks"),
        Given("plan.splits_backward"),
    ),
    Rule(
        "recompute=around_attention, but the schedule {plan.schedule} computes a block again several times, and what "
        "attention gave is kept for one; use --recompute full or another schedule",
        Is("recompute", "==", "around_attention"),
        Given("plan.splits_backward"),
    ),
)


class KeepsScores(Condition):
    """An attention core of `Settings` keeps scores for backward."""

    def fits(self, values: Values, name: str) -> bool:
        return scores_backend(values.config) is not None


SETTINGS_RULES: Rules = (
    Rule(
        "recompute=around_attention, but attention is {remedy} here, which keeps scores for backward beside "
        "its output; use --attention flash, or sdpa without dropout, or --recompute full",
        Is("recompute", "==", "around_attention"),
        KeepsScores("attention"),
        remedy=lambda settings: str(scores_backend(settings)),
    ),
)


def repeats_blocks(settings: Settings) -> bool:
    """Return whether each step computes blocks again in backward, with or without their attention."""
    return settings.recompute in ("around_attention", "full")


def repeats(settings: Settings, index: int) -> bool:
    """Return whether what `recompute` names is computed again in a block, given by its place in its stage."""
    most = settings.recompute_blocks
    return settings.recompute != "none" and (most is None or index < most)


def recomputes(settings: Settings) -> list[Recompute]:
    """Return what may be computed again to save memory, the least first."""
    return ["none", "selective" if scores_backend(settings) else "around_attention", "full"]
