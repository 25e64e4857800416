"""The recipe's section of preferences (DPO; Rafailov et al. 2023), and what a run with them cannot have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dtgpt.config.checks import check_unused
from dtgpt.config.sections import Section, precision_of
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

if TYPE_CHECKING:
    from dtgpt.config.recipe import Recipe  # which has this section


Kind = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, kw_only=True)
class DpoConfig(Section):
    """The loss of pairs of answers. The reference is the model with which the run begins."""

    beta: Annotated[
        float,
        "train on pairs of answers, as dtgpt prepare --preferences writes them: factor of a reward, which is the "
        "log-probability of an answer relative to the first model's; 0: data are not pairs",
        Bounds(0),
    ] = 0.0
    loss: Annotated[Kind, "loss of a pair: sigmoid (DPO) or ipo, with the mean over tokens"] = "sigmoid"
    label_smoothing: Annotated[
        float, "probability that the answers of a pair are the wrong way round, for sigmoid", Bounds(0, below=0.5)
    ] = 0.0

    def check_recipe(self, recipe: "Recipe") -> None:
        if self.beta == 0:
            check_unused("dpo", self, "beta", 0.1)
            return
        if self.loss == "ipo" and self.label_smoothing:
            raise UserError(
                f"dpo.label_smoothing={self.label_smoothing:g} is for dpo.loss=sigmoid, and not for ipo; leave one out"
            )
        if precision_of(recipe.precision) is not None:
            raise UserError(
                f"dpo.beta={self.beta:g}, but scales of {recipe.precision} change from step to step, and "
                "log-probabilities with them; use --precision bf16"
            )

    def check_new_weights(self) -> None:
        if self.beta:
            raise UserError(
                f"dpo.beta={self.beta:g} trains a model on what it prefers already; name it with --init_from MODEL, "
                "or leave dpo.beta out"
            )
