"""The recipe's section of preferences (DPO; Rafailov et al. 2023), and what a run with them cannot have."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dtgpt.config.recipe_rules import PRECISIONS
from dtgpt.config.sections import Section
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Given, Is, Missing, Rule, Rules

Kind = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, kw_only=True)
class DpoConfig(Section):
    """The loss of pairs of answers. The reference is the model with which the run begins."""

    recipe_rules: ClassVar[Rules] = (
        Rule(
            "{field}={value} has no effect with dpo.beta=0; give --dpo.beta, such as 0.1, or --{field} {default}, its "
            "default",
            Changed("dpo.loss", "dpo.label_smoothing"),
            Missing("dpo.beta"),
        ),
        Rule(
            "dpo.label_smoothing={dpo.label_smoothing:g} is for dpo.loss=sigmoid, and not for ipo; leave one out",
            Given("dpo.label_smoothing"),
            Is("dpo.loss", "==", "ipo"),
        ),
        Rule(
            "dpo.beta={dpo.beta:g}, but scales of {precision} change from step to step, and log-probabilities with "
            "them; use --precision bf16",
            Given("dpo.beta"),
            Is("precision", "not in", PRECISIONS),
        ),
    )
    new_weights_rules: ClassVar[Rules] = (
        Rule(
            "dpo.beta={beta:g} trains a model on what it prefers already; name it with --init_from MODEL, or leave "
            "dpo.beta out",
            Given("beta"),
        ),
    )

    beta: Annotated[
        float,
        "train on pairs of answers, as dtgpt prepare --preferences writes them: factor of a reward, which is the "
        "log-probability of an answer relative to the first model's; 0: data are not pairs",
        Bounds(0),
    ] = 0.0
    loss: Annotated[Kind, "loss of a pair: sigmoid (DPO) or ipo, with the mean over tokens"] = "sigmoid"
    label_smoothing: Annotated[
        float, "probability that the two answers of a pair are exchanged, for sigmoid", Bounds(0, below=0.5)
    ] = 0.0
