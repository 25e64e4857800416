"""The recipe's section of reinforcement learning (GRPO; Shao et al. 2024), and what a run with it cannot have."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from dtgpt.config.execution import MOST_SLOTS, Settings, Switch
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe_rules import PRECISIONS
from dtgpt.posttrain.demands import Rows, SampleMaker
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Given, Is, Missing, Other, Rule, Rules, check_rules

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
class GrpoConfig(SampleMaker):
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
    def has_task(self) -> bool:
        """Whether the class says what to ask and what an answer is worth."""
        return type(self) is not GrpoConfig

    @property
    def makes_samples(self) -> bool:
        return self.group > 0

    def check_recipe(self, recipe: "Recipe") -> None:
        if self.group:
            others = [name for name in seams.added("objectives") if name != "grpo.group"]
            alone = Rule(
                "grpo.group={grpo.group} cannot be combined with {field}; leave one out", Given(*others, *EXCLUDED)
            )
            check_rules((*RULES, alone), recipe)
        elif not self.has_task:  # one that a recipe has may be off with all of its values
            check_rules(RULES_OF_OFF, recipe)

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


NO_GROUPS = (
    "grpo.group={grpo.group} does not make global_batch_size={global_batch_size} groups of two or more answers; use a "
    "divisor of it above 1"
)
RULES: Rules = (  # of a recipe in which it is on
    Rule(
        "grpo.group={grpo.group}, but the recipe does not say what to ask and what an answer is worth; give it a "
        "subclass of GrpoConfig with prompt and reward as grpo, as recipes/grpo_arithmetic.py does",
        Missing("grpo.has_task"),
    ),
    Rule(NO_GROUPS, Is("grpo.group", "==", 1)),
    Rule(NO_GROUPS, Is("global_batch_size", "is no multiple of", Other("grpo.group"))),
    Rule(
        "grpo.slots={grpo.slots} is below grpo.group={grpo.group}, whose answers are drawn together; use "
        "grpo.slots={grpo.group} or more",
        Given("grpo.slots"),
        Is("grpo.slots", "<", Other("grpo.group")),
    ),
    Rule(
        "grpo.max_new_tokens={grpo.max_new_tokens} leaves no room for a prompt in a sample of {sample_length} tokens; "
        "use a smaller one, or a larger --seq_length",
        Is("grpo.max_new_tokens", ">=", Other("sample_length")),
    ),
    # Answers are drawn from the model that is trained.
    Rule(
        "grpo.group={grpo.group}, but model.dropout={model.dropout:g}, without which answers are drawn; use "
        "--model.dropout 0",
        Given("model.dropout"),
    ),
    Rule(
        "grpo.group={grpo.group}, but precision={precision} draws answers in 16 bits and trains in 8; use --precision "
        "bf16",
        Is("precision", "not in", PRECISIONS),
    ),
)
RULES_OF_OFF: Rules = (
    Rule(
        "{field}={value} has no effect with grpo.group=0; give --grpo.group, such as 8, or --{field} {default}, its "
        "default",
        Changed(*(f"grpo.{field.name}" for field in fields(GrpoConfig) if field.name != "group")),
        Missing("grpo.group"),
    ),
)


def draws_alone(plan: ResolvedPlan) -> bool:
    """Return whether each rank draws the answers of a part of the prompts by itself, since it holds the whole model.
    Else all ranks draw all answers together."""
    return plan.tp == plan.pp == plan.ep == 1 and not plan.zero


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
