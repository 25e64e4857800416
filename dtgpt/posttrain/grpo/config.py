"""The recipe's section of reinforcement learning (GRPO; Shao et al. 2024), and what a run with it cannot have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dtgpt.config.checks import check_unused
from dtgpt.config.execution import MOST_SLOTS, Groups, Switch
from dtgpt.config.fp8 import FP8
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

if TYPE_CHECKING:  # a recipe has this section
    from dtgpt.config.plan import ResolvedPlan

MOST = 128  # answers to a prompt, as many as the engine gives
Message = dict[str, str]  # with the keys role and content


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
    stop: Annotated[str, "text that ends an answer, beside an end of text or of a turn; empty: none"] = ""
    loss: Annotated[
        Literal["dr_grpo", "grpo", "dapo"],
        "mean over tokens: dr_grpo divides sums by max_new_tokens, grpo those of an answer by its length, dapo all by "
        "the number of tokens of the step; the last two divide A by the standard deviation of its group",
    ] = "dr_grpo"
    slots: Annotated[
        int | None,
        f"answers that are drawn at the same time, for which memory is kept; none: all of a step, up to {MOST_SLOTS}",
        Bounds(1, MOST_SLOTS),
    ] = None
    exact: Annotated[
        Switch,
        "draw answers with the bits of training's log-probabilities; auto: where GPU, plan and model can",
    ] = "auto"

    share_prompts: Annotated[
        Switch,
        "compute a prompt once for all answers to it in training; auto: where plan and micro-batches can",
    ] = "auto"

    def prepare(self) -> None:
        """Read what prompts need. Called on each rank before a run begins; raises UserError where it is missing."""

    def prompt(self, index: int) -> str | list[Message]:
        """Return a prompt, a function of its index: 0, 1, ... over all steps of the run. It is a text, or the messages
        of a chat, `{"role": "user", "content": "..."}`, which the tokenizer's template renders."""
        raise NotImplementedError(f"{type(self).__name__} needs a method prompt(self, index)")

    def reward(self, index: int, answer: str) -> float:
        """Return the reward of an answer to `prompt(index)`: its text, without what ended it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reward(self, index, answer)")

    @property
    def groups(self) -> Groups | None:
        """The answers that begin alike; None without reinforcement."""
        return Groups(self.group, self.max_new_tokens, self.share_prompts) if self.group else None

    def slots_for(self, answers: int, plan: "ResolvedPlan") -> int:
        """Return how many of the answers of a step a rank draws at the same time; 0 without reinforcement."""
        if not self.group:
            return 0
        groups = -(-answers // (self.group * (plan.data_ranks if draws_alone(plan) else 1)))
        return min(self.slots or MOST_SLOTS, groups * self.group)


def draws_alone(plan: "ResolvedPlan") -> bool:
    """Return whether each rank draws the answers of a part of the prompts by itself, since it holds the whole model.
    Else all ranks draw all answers together."""
    return plan.tp == plan.pp == 1 and not plan.zero


def check_grpo(
    grpo: GrpoConfig, global_batch_size: int, length: int, dropout: float, precision: str, others: dict[str, bool]
) -> None:
    """Raise UserError where a run cannot have answers beside a recipe's other values. length: tokens of a sample;
    others: what excludes them, by the name of an option, and whether it is there."""
    if grpo.group == 0:
        if type(grpo) is GrpoConfig:  # a task that a recipe has may be off with all of its values
            check_unused("grpo", grpo, "group", 8)
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
    if grpo.slots is not None and grpo.slots < grpo.group:
        raise UserError(
            f"grpo.slots={grpo.slots} is below grpo.group={grpo.group}, whose answers are drawn together; use "
            f"grpo.slots={grpo.group} or more"
        )
    if grpo.max_new_tokens >= length:
        raise UserError(
            f"grpo.max_new_tokens={grpo.max_new_tokens} leaves no room for a prompt in a sample of {length} tokens; "
            "use a smaller one, or a larger --seq_length"
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


def grpo_notes(grpo: GrpoConfig, plan: "ResolvedPlan") -> list[str]:
    """Return what a user should know of a run with answers."""
    if not grpo.group or plan.data_ranks == 1 or draws_alone(plan):
        return []
    return [
        f"under {plan.name} each of {plan.data_ranks} ranks of dp x cp draws all answers of a step; under a plan "
        "without tp, pp and ZeRO they share them"
    ]
