"""A capability in one file: a section of recipes that limits the learning rate, and a command that names its options.
Those of dtgpt import nothing where they are described, so that the list of commands is there at once."""

from dataclasses import dataclass
from typing import Annotated

from dtgpt.commands.command import Command
from dtgpt.config.sections import Section
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability, CommandEntry


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Section):
    lr: Annotated[float | None, "largest learning rate of a recipe; none: any", Bounds(above=0)] = None

    def check_recipe(self, recipe) -> None:
        if self.lr is not None and recipe.optimizer.lr > self.lr:
            raise UserError(f"optimizer.lr={recipe.optimizer.lr:g} is above limits.lr={self.lr:g}; lower it")

    def notes_on(self, plan) -> list[str]:
        return [] if self.lr is None else [f"the learning rate stays below {self.lr:g}"]


@dataclass(frozen=True, kw_only=True)
class LimitsOptions:
    """Print the options that limit a recipe."""

    quietly: Annotated[bool, "print nothing"] = False


def show(options: LimitsOptions) -> None:
    if not options.quietly:
        say("--limits.lr")


command = Command("limits", LimitsOptions, show, "")
CAPABILITY = Capability(
    sections={"limits": f"{__name__}:LimitsConfig"},
    commands={"limits": CommandEntry(f"{__name__}:command", "dtgpt limits\n    print the options that limit a recipe")},
)
