"""The recipe's section of reinforcement learning (GRPO; Shao et al. 2024), and what a run with it cannot have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dtgpt.config.fp8 import FP8
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

if TYPE_CHECKING:  # a recipe has this section
    from dtgpt.config.plan import ResolvedPlan

MOST = 128  # answers to a prompt, as many as the engine gives


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Answers of the model to prompts, and rewards for them. A recipe names a subclass with a `prompt` and a `reward`.

    The gradient is that of -A log p of the tokens of an answer, A its reward less the mean of its group: one update for
    each batch of answers, so that the ratio of the new policy to the one that answered is 1, and nothing is clipped.
    """

    group: Annotated[
        int, "answers to each prompt, of which global_batch_size is a multiple; 0: no reinforcement", Bounds(0, MOST)
    ] = 0
    max_new_tokens: Annotated[int, "largest number of tokens in an answer", Bounds(1)] = 64
    stop: Annotated[str, "text that ends an answer, beside an end of text; empty: none"] = ""
    loss: Annotated[
        Literal["dr_grpo", "grpo", "dapo"],
        "mean over tokens: dr_grpo divides sums by max_new_tokens, grpo those of an answer by its length, dapo all by "
        "the number of tokens of the step; the last two divide A by the standard deviation of its group",
    ] = "dr_grpo"
    after: Annotated[int, "steps of training on the data before the first answers", Bounds(0)] = 0

    def prompt(self, index: int) -> str:
        """Return the text of a prompt, a function of its index: 0, 1, ... over all steps of the run."""
        raise NotImplementedError(f"{type(self).__name__} needs a method prompt(self, index)")

    def reward(self, index: int, answer: str) -> float:
        """Return the reward of an answer to `prompt(index)`: its text, without what ended it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reward(self, index, answer)")


def check_grpo(
    grpo: GrpoConfig, global_batch_size: int, dropout: float, precision: str, others: dict[str, bool]
) -> None:
    """Raise UserError where a run cannot have answers beside a recipe's other values. others: what excludes them, by
    the name of an option, and whether it is there."""
    if grpo.group == 0:
        return
    if type(grpo) is GrpoConfig:
        raise UserError(
            f"grpo.group={grpo.group}, but the recipe does not say what to ask and what an answer is worth; give it a "
            "subclass of GrpoConfig with prompt and reward as grpo, as recipes/grpo_arithmetic.py does"
        )
    if grpo.group == 1 or global_batch_size % grpo.group:
        raise UserError(
            f"grpo.group={grpo.group} does not make global_batch_size={global_batch_size} groups of two or more "
            "answers; use a divisor of it above 1"
        )
    if dropout:
        raise UserError(
            f"grpo.group={grpo.group}, but model.dropout={dropout:g}, without which answers are drawn; use "
            "--model.dropout 0"
        )
    if precision == FP8:
        raise UserError(
            f"grpo.group={grpo.group}, but precision=fp8 draws answers in 16 bits and trains in 8; use --precision bf16"
        )
    if named := next((name for name, given in others.items() if given), None):
        raise UserError(f"grpo.group={grpo.group} cannot be combined with {named}; leave one out")


def check_grpo_plan(grpo: GrpoConfig, plan: "ResolvedPlan") -> None:
    """Raise UserError where a run with answers cannot have this plan."""
    if grpo.group and plan.cp > 1:
        raise UserError(
            f"grpo.group={grpo.group}, but the plan {plan.name} cuts samples over cp={plan.cp}, for which answers are "
            "not tested; leave cp out"
        )
