"""The recipe's section of low-rank adapters (LoRA; Hu et al. 2021), and what a run with them cannot have."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, ClassVar

from dtgpt.config.recipe_rules import PRECISIONS
from dtgpt.config.sections import Section
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.roles import MATRICES, MLP_COLUMNS, ROWS, STACKS, Role
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, Pattern
from dtgpt.util.rules import Changed, Given, Is, Missing, Other, Rule, Rules

TARGETS = {
    "qkv": {Role.QKV},
    "column": {*MLP_COLUMNS},
    "row": {*ROWS},
}
NAMES = "|".join(TARGETS)
BITS = (0, 4)
NO_RANK = "lora.rank={lora.rank} is not the rank of an adapter; use 1 to {model.hidden_size}, or 0 to train the weights"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Adapters of rank `rank` for the matrices of blocks: y = x W^T + (alpha / rank) (x A^T) B^T. W stays as it is, in
    the type that the run computes in, or in 4 `bits`; A and B are trained."""

    fixed: ClassVar[bool] = True  # the weights of a checkpoint are of this rank and these targets
    recipe_rules: ClassVar[Rules] = (
        Rule(NO_RANK, Is("lora.rank", "<", 0)),
        Rule(NO_RANK, Is("lora.rank", ">", Other("model.hidden_size"))),
        Rule(
            "lora.bits={lora.bits} is not known; use --lora.bits 4, or 0 for the precision of the run",
            Is("lora.bits", "not in", BITS),
        ),
        Rule(
            "lora.bits={lora.bits} holds weights that are not trained, and lora.rank=0 trains them; give --lora.rank, "
            "such as 16, to train adapters beside them, or --lora.bits 0",
            Given("lora.bits"),
            Missing("lora.rank"),
        ),
        Rule(
            "{field}={value} has no effect with lora.rank=0; give --lora.rank, such as 16, or --{field} {default}, its "
            "default",
            Changed("lora.alpha", "lora.targets"),
            Missing("lora.rank"),
        ),
        Rule(
            "lora.rank={lora.rank}, but optimizer.kind={optimizer.kind} is for whole matrices, and AdamW trains "
            "adapters; use --optimizer.kind adamw or --lora.rank 0",
            Given("lora.rank"),
            Is("optimizer.kind", "!=", "adamw"),
        ),
        Rule(
            "lora.rank={lora.rank}, but adapters are not computed with products in {precision}; use --precision bf16 "
            "or --lora.rank 0",
            Given("lora.rank"),
            Is("precision", "not in", PRECISIONS),
        ),
        Rule(
            "lora.rank={lora.rank}, but reduce={reduce} sums the gradients of whole weights alone; use --reduce fast "
            "or --lora.rank 0",
            Given("lora.rank"),
            Is("reduce", "!=", "fast"),
        ),
    )
    plan_rules: ClassVar[Rules] = (
        Rule(
            "lora.rank={rank}, but the schedule {plan.schedule} makes gradients of weights apart from those of "
            "activations, which frozen weights do not have; use another schedule or --lora.rank 0",
            Given("rank"),
            Given("plan.splits_backward"),
        ),
        Rule(
            "lora.bits={bits} under zero{plan.zero} needs torch 2.13 or newer, since fully_shard of torch {torch} "
            "takes no integers; install it, or use a plan without zero or --lora.bits 0",
            Given("has_whole_integers"),
            Given("plan.zero"),
        ),
    )
    new_weights_rules: ClassVar[Rules] = (
        Rule(
            "lora.rank={rank} adapts a model that is trained already; name it with --init_from MODEL, or use "
            "--lora.rank 0 to train all weights",
            Given("rank"),
        ),
    )

    rank: Annotated[int, "rank of adapters, which are trained in place of the weights; 0: train the weights"] = 0
    alpha: Annotated[float, "adapters are scaled by alpha / rank", Bounds(above=0)] = 32.0
    targets: Annotated[
        str,
        "matrices with an adapter, by role: qkv (queries, keys and values), column (the first matrices of the MLP, and "
        "of each expert), row (outputs of attention, MLP and experts)",
        Pattern(f"({NAMES})(,({NAMES}))*", f"is not known; use some of {','.join(TARGETS)}"),
    ] = ",".join(TARGETS)
    bits: Annotated[
        int,
        "bits of the matrices of blocks, which are not trained: 4 (NF4 with quantised scales: QLoRA); 0: those of the "
        "precision",
    ] = 0

    @property
    def roles(self) -> set[Role]:
        return {role for name in self.targets.split(",") for role in TARGETS[name]}

    @property
    def torch(self) -> str:
        return version("torch")

    @property
    def has_whole_integers(self) -> bool:
        """Return whether weights in 4 bits are integers that this version of torch cannot shard."""
        return self.bits > 0 and tuple(map(int, self.torch.split(".")[:2])) < (2, 13)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, parameter: Parameter) -> bool:
        """Return whether a parameter of the model has an adapter."""
        return parameter.block is not None and parameter.name.endswith(".weight") and parameter.role in self.roles

    def quantises(self, parameter: Any) -> bool:
        """Return whether a parameter of the model, of an inventory or of planning, is held in few bits."""
        matrix = parameter.block is not None and parameter.name.endswith(".weight") and parameter.role in MATRICES
        return self.bits > 0 and matrix

    def check_recipe(self, recipe: Any) -> None:
        super().check_recipe(recipe)
        self._check_matrices(recipe.model)

    def check_settings(self, settings: Any) -> None:
        self._check_matrices(settings.model, settings.plan.tp)

    def _check_matrices(self, model: ModelConfig, tp: int = 1) -> None:
        """Raise UserError where matrices of a model, or their parts under tp, are not held in 4 bits."""
        if not self.bits:
            return
        from dtgpt.ops.nf4.form import BLOCK  # here: every recipe reads this file

        parts = inventory(model)
        for p in (p for index in parts.counts for p in parts.of_block(index)):
            if p.role in STACKS:
                raise UserError(
                    f"lora.bits={self.bits}, but {p.name} is a stack of matrices of experts, which dtgpt does not hold "
                    "in 4 bits; use --lora.bits 0"
                )
            ranks = tp if p.role in ROWS else 1
            if self.quantises(p) and p.shape[1] % (BLOCK * ranks):
                each = f" on each of tp={tp} ranks" if ranks > 1 else ""
                raise UserError(
                    f"lora.bits={self.bits}, but rows of {p.name} have {p.shape[1] // ranks} elements{each}, no "
                    f"multiple of {BLOCK}, of which each {BLOCK} have a scale; use {'a smaller tp, or ' * (ranks > 1)}"
                    "--lora.bits 0"
                )

    @property
    def freezes_weights(self) -> bool:
        return self.rank > 0
