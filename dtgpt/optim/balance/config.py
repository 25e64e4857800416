"""The recipe's section on the balance of experts, and what a run with it cannot have."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dtgpt.config.sections import Section
from dtgpt.posttrain.demands import makes_samples
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, Pattern
from dtgpt.util.rules import Changed, Missing, Rule, Rules

COEFFICIENT = Bounds(0, 1e6)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Section):
    """What keeps the experts of a mixture evenly used. Losses are means over the layers that have experts, and do not
    depend on the plan, the number of micro-batches or replicas; records have them beside the loss."""

    recipe_rules: ClassVar[Rules] = (
        Rule(
            "{field}={value} has no effect with balance.loss=0; give --balance.loss, such as 0.01, or --{field} "
            "{default}, its default",
            Changed("balance.over", "balance.layers"),
            Missing("balance.loss"),
        ),
    )

    bias_step: Annotated[
        float,
        "by how much the correction of each expert's score moves in a step: up where the expert has less than its "
        "share of the global batch, down where it has more (DeepSeek-V3, which has 0.001); 0: not at all",
        Bounds(0, 1),
    ] = 0.0
    loss: Annotated[float, "coefficient of the auxiliary loss of uneven loads; 0: none", COEFFICIENT] = 0.0
    over: Annotated[
        str,
        "tokens over which the auxiliary loss compares loads: batch (the global batch) or sequence (each sample)",
        Pattern(
            "batch|sequence",
            "is not what the auxiliary loss can compare loads over: that of a micro-batch or a replica would depend on "
            "the plan; use batch or sequence",
        ),
    ] = "batch"
    layers: Annotated[
        str,
        "layers over which the auxiliary loss of the global batch compares loads: together (as transformers does) or "
        "apart",
        Pattern("together|apart", "is not known; use together or apart"),
    ] = "together"
    z_loss: Annotated[
        float, "coefficient of the mean squared logarithm of the sum of exponentials of a router's logits", COEFFICIENT
    ] = 0.0

    @property
    def looks_ahead(self) -> bool:
        """Whether gradients need loads of the whole batch, which are known when all its micro-batches have run."""
        return self.loss > 0 and self.over == "batch"

    def check_recipe(self, recipe: Any) -> None:
        names = ("bias_step", "loss", "z_loss", "over", "layers")
        given = next((name for name in names if getattr(self, name) != DEFAULTS[name]), None)
        if given is None:  # a recipe without the list of capabilities does not know that this is as it was
            return
        from dtgpt.models.moe.config import ExpertsConfig  # every recipe reads this file

        value = f"balance.{given}={getattr(self, given)}"
        if not isinstance(recipe.model, ExpertsConfig):
            raise UserError(
                f"{value}, but a model of {recipe.model.architecture} has no experts; leave --balance.{given} out"
            )
        super().check_recipe(recipe)
        if self.bias_step and not recipe.model.corrects_choice:
            raise UserError(
                f"{value}, but the routers of this {recipe.model.architecture} have no correction of their choice that "
                "it could move; use --model.corrects_choice on where the family has that option, else --balance.loss"
            )
        if makes_samples(recipe.sections):
            raise UserError(
                f"{value}, but the samples that this run makes do not say which of their tokens are padding, which "
                f"must not count; leave --balance.{given} out"
            )
        if self.bias_step and recipe.freezes_weights:
            raise UserError(
                f"{value}, but the correction that it moves is a weight of the model, and adapters leave these as they "
                "are; use --balance.loss"
            )


DEFAULTS = {name: field.default for name, field in BalanceConfig.__dataclass_fields__.items()}
