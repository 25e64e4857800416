"""The recipe's section of low-rank adapters (LoRA; Hu et al. 2021), and what a run with them cannot have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from dtgpt.config.checks import check_unused
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.sections import Section, precision_of
from dtgpt.models.inventory import Parameter
from dtgpt.models.roles import Role
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, Pattern

if TYPE_CHECKING:
    from dtgpt.config.recipe import Recipe  # which has this section

TARGETS = {
    "qkv": {Role.QKV},
    "column": {Role.COLUMN, Role.COLUMN_STACK},
    "row": {Role.ROW, Role.ROW_STACK},
}
NAMES = "|".join(TARGETS)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Adapters of rank `rank` for the matrices of blocks: y = x W^T + (alpha / rank) (x A^T) B^T. W stays as it is, in
    the type that the run computes in; A and B are trained."""

    fixed: ClassVar[bool] = True  # the weights of a checkpoint are of this rank and these targets

    rank: Annotated[int, "rank of adapters, which are trained in place of the weights; 0: train the weights"] = 0
    alpha: Annotated[float, "adapters are scaled by alpha / rank", Bounds(above=0)] = 32.0
    targets: Annotated[
        str,
        "matrices with an adapter, by role: qkv (queries, keys and values), column (the first matrices of the MLP), "
        "row (outputs of attention and MLP)",
        Pattern(f"({NAMES})(,({NAMES}))*", f"is not known; use some of {','.join(TARGETS)}"),
    ] = ",".join(TARGETS)

    @property
    def roles(self) -> set[Role]:
        return {role for name in self.targets.split(",") for role in TARGETS[name]}

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, parameter: Parameter) -> bool:
        """Return whether a parameter of the model has an adapter."""
        return parameter.block is not None and parameter.name.endswith(".weight") and parameter.role in self.roles

    @property
    def freezes_weights(self) -> bool:
        return self.rank > 0

    def check_recipe(self, recipe: "Recipe") -> None:
        rank, hidden_size, optimizer = self.rank, recipe.model.hidden_size, recipe.optimizer.kind
        if not 0 <= rank <= hidden_size:
            raise UserError(
                f"lora.rank={rank} is not the rank of an adapter; use 1 to {hidden_size}, or 0 to train the weights"
            )
        if rank == 0:
            check_unused("lora", self, "rank", 16)
            return
        if optimizer != "adamw":
            raise UserError(
                f"lora.rank={rank}, but optimizer.kind={optimizer} is for whole matrices, and AdamW trains adapters; "
                "use --optimizer.kind adamw or --lora.rank 0"
            )
        if precision_of(recipe.precision) is not None:
            raise UserError(
                f"lora.rank={rank}, but adapters are not computed with products in {recipe.precision}; use "
                "--precision bf16 or --lora.rank 0"
            )
        if recipe.reduce == "exact":
            raise UserError(
                f"lora.rank={rank}, but reduce=exact sums the gradients of whole weights alone; use --reduce fast or "
                "--lora.rank 0"
            )

    def check_new_weights(self) -> None:
        if self.rank:
            raise UserError(
                f"lora.rank={self.rank} adapts a model that is trained already; name it with --init_from MODEL, or "
                "use --lora.rank 0 to train all weights"
            )

    def check_plan(self, plan: ResolvedPlan) -> None:
        if self.rank and plan.splits_backward:
            raise UserError(
                f"lora.rank={self.rank}, but the schedule {plan.schedule} makes gradients of weights apart from those "
                "of activations, which frozen weights do not have; use another schedule or --lora.rank 0"
            )
