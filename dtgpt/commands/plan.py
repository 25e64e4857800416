"""`dtgpt plan`: what a recipe needs under a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtgpt.commands.recipes import RecipeCommand
from dtgpt.config.overrides import Options
from dtgpt.config.recipe import Recipe
from dtgpt.inference.memory import MOST_SLOTS
from dtgpt.train.settle import check_run, settle
from dtgpt.util.console import say
from dtgpt.util.field_types import Bounds


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Show what a recipe needs under a parallel plan: the memory of each rank, the messages of a step, and the idle
    time of a pipeline. No GPU is needed, and no process is started.

    Options of the recipe, such as --plan and --micro_batch_size, can be added.
    """

    world: Annotated[int | None, "number of processes; none: the fewest that the plan needs", Bounds(1, 10**9)] = None
    gpu: Annotated[str | None, "GPU model, such as H100, or its memory in GiB; none: this machine's GPU, else H200"] = (
        None
    )
    inference_slots: Annotated[
        int | None, "show the memory to generate this number of texts at the same time, too", Bounds(1, MOST_SLOTS)
    ] = None


def plan(recipe: Recipe, own: PlanOptions, given: Options, path: Path) -> None:
    from dtgpt.inference.memory_report import describe_generation
    from dtgpt.planning.report import describe_plan

    recipe = settle(recipe, given)
    check_run(recipe)
    choice, settings = recipe.planned_choice(own.world), recipe.planned(own.world)
    for line in [*choice.describe(), *choice.explain()]:
        say(line)
    notes = recipe.notes(choice, settings.device.type)
    say(describe_plan(settings, recipe.name, notes, own.gpu))
    if own.inference_slots:
        say(f"\n{describe_generation(settings, own.inference_slots, own.gpu)}")


command = RecipeCommand("plan RECIPE.py", PlanOptions, plan, "recipes/gpt2_345m.py --plan tp2_pp2")
