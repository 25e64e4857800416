"""The recipe's section of receipts, and what a checkpoint says of those that were not written yet."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dtgpt.config.sections import Section
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Missing, Rule, Rules

NAME = "receipts"  # of the section, and of the entry of a checkpoint
PARTS = 8


@dataclass(frozen=True, kw_only=True)
class ReceiptsConfig(Section):
    on: Annotated[bool, "write a receipt of each step, by which dtgpt audit can compute the step again"] = False
    parts: Annotated[
        int,
        "a receipt has the digests of one of so many parts of the tensors, each part in its turn; 1: of all tensors",
        Bounds(1, 4096),
    ] = PARTS
    recipe_rules: ClassVar[Rules] = (
        Rule(
            "receipts.parts={receipts.parts} has no effect without receipts; add --receipts.on",
            Changed("receipts.parts"),
            Missing("receipts.on"),
        ),
    )


def check_entry(entry: Any, config: Any) -> None:
    """Raise ValueError where an entry of a checkpoint is not what the state returned."""
    if type(entry) is not list or not all(type(line) is dict for line in entry):
        raise ValueError(f"{NAME} must be a list of lines")
