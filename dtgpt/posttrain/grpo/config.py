"""The recipe's section of reinforcement learning (GRPO; Shao et al. 2024), and what a run with it cannot have."""

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal

from dtgpt.config.checks import check_unused
from dtgpt.config.execution import MOST_SLOTS, Settings, Switch
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.sections import Rows, Section, precision_of
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

if TYPE_CHECKING:
    from dtgpt.config.recipe import Recipe  # which has this section

MOST = 128  # answers to a prompt, as many as the engine gives
Message = dict[str, str]  # with the keys role and content
# Options without which answers are drawn, beside other objectives.
EXCLUDED = (
    "rampup_batch_size",
    "data.overfit",
    "data.reset_position_ids",
    "data.reset_attention_mask",
    "data.eod_mask_loss",
)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(Section):
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
    def makes_samples(self) -> bool:
        return self.group > 0

    def check_recipe(self, recipe: "Recipe") -> None:
        if self.group:
            _check_values(self, recipe.global_batch_size, recipe.sample_length)
            _check_model(self, recipe.model.dropout, recipe.precision)
            others = [name for name in seams.added("objectives") if name != "grpo.group"]
            _check_alone(self, [name for name in (*others, *EXCLUDED) if attrgetter(name)(recipe)])
        elif type(self) is GrpoConfig:  # a task that a recipe has may be off with all of its values
            check_unused("grpo", self, "group", 8)

    def check_settings(self, settings: Settings) -> None:
        if self.share_prompts == "on" and self.group and (reason := why_not_shared(settings)):
            raise UserError(f"grpo.share_prompts=on, but {reason}; use --grpo.share_prompts auto")

    def notes_on(self, plan: ResolvedPlan) -> list[str]:
        if not self.group or plan.data_ranks == 1 or draws_alone(plan):
            return []
        return [
            f"under {plan.name} each of {plan.data_ranks} ranks of dp x cp draws all answers of a step; under a plan "
            "without tp, pp and ZeRO they share them"
        ]

    def rows_of(self, settings: Settings) -> Rows | None:
        if not shares_prompts(settings):
            return None
        return Rows(settings.micro_batch_size // self.group, shared_length(self, settings.seq_length), self.group)

    def slots_for(self, samples: int, plan: ResolvedPlan) -> int:
        if not self.group:
            return 0
        groups = -(-samples // (self.group * (plan.data_ranks if draws_alone(plan) else 1)))
        return min(self.slots or MOST_SLOTS, groups * self.group)


def draws_alone(plan: ResolvedPlan) -> bool:
    """Return whether each rank draws the answers of a part of the prompts by itself, since it holds the whole model.
    Else all ranks draw all answers together."""
    return plan.tp == plan.pp == 1 and not plan.zero


def shares_prompts(settings: Settings) -> bool:
    """Return whether training computes a prompt once for all answers to it: those of a group are one row."""
    return settings.section(GrpoConfig).share_prompts != "off" and why_not_shared(settings) is None


def shared_length(grpo: GrpoConfig, length: int) -> int:
    """Return the tokens of a row that has what the samples of a group share once, and then, of each, the last token of
    its prompt and what is behind. length: of a sample."""
    return length + (grpo.group - 1) * (grpo.max_new_tokens + 1)


def why_not_shared(settings: Settings) -> str | None:
    """Return why training cannot compute a prompt once for all answers to it; None where it can."""
    plan, grpo = settings.plan, settings.section(GrpoConfig)
    if not grpo.group:
        return "samples do not begin alike"
    if plan.pp > 1 or plan.cp > 1:
        return f"plan={plan.name} hands samples of one length on from rank to rank"
    if settings.micro_batch_size % grpo.group:
        return f"micro_batch_size={settings.micro_batch_size} is not a multiple of grpo.group={grpo.group}"
    if plan.sequence_parallel and (length := shared_length(grpo, settings.seq_length)) % plan.tp:
        return f"tp={plan.tp} does not divide the {length:,} tokens of a group"
    return "reduce=exact has the bits of plans that cannot" if settings.reduce == "exact" else None


def _check_values(grpo: GrpoConfig, global_batch_size: int, length: int) -> None:
    """Check the values of a run with answers with its sizes. length: tokens of a sample."""
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


def _check_model(grpo: GrpoConfig, dropout: float, precision: str) -> None:
    """Check that answers can be drawn from the model that is trained."""
    if dropout:
        raise UserError(
            f"grpo.group={grpo.group}, but model.dropout={dropout:g}, without which answers are drawn; use "
            "--model.dropout 0"
        )
    if precision_of(precision) is not None:
        raise UserError(
            f"grpo.group={grpo.group}, but precision={precision} draws answers in 16 bits and trains in 8; use "
            "--precision bf16"
        )


def _check_alone(grpo: GrpoConfig, given: list[str]) -> None:
    """Check that a recipe has none of the options that answers exclude. given: those of them that it has."""
    if given:
        raise UserError(f"grpo.group={grpo.group} cannot be combined with {given[0]}; leave one out")
