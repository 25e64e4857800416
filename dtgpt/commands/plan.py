"""`dtgpt plan`: what a recipe needs under a plan."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from dtgpt.commands.recipes import RecipeCommand
from dtgpt.config.overrides import Options
from dtgpt.config.plan_choice import parse_alternatives
from dtgpt.config.recipe import Recipe
from dtgpt.inference.memory import MOST_SLOTS
from dtgpt.train.job import checked
from dtgpt.train.settle import settle
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Show what a recipe needs under a parallel plan: the memory of each rank, the messages of a step, and the idle
    time of a pipeline. No GPU is needed, and no process is started.

    Several plans or numbers of processes make one table.

    Options of the recipe, such as --plan and --micro_batch_size, can be added.
    """

    world: Annotated[
        tuple[int, ...],
        "number of processes; several: a table; none: the fewest that the plan needs",
        Bounds(1, 10**9),
    ] = ()
    plans: Annotated[tuple[str, ...], "plans to show in a table, in place of --plan"] = ()
    gpu: Annotated[str | None, "GPU model, such as H100, or its memory in GiB; none: this machine's GPU, else H200"] = (
        None
    )
    inference_slots: Annotated[
        int | None, "show the memory to generate this number of texts at the same time, too", Bounds(1, MOST_SLOTS)
    ] = None


def plan(recipe: Recipe, own: PlanOptions, given: Options, path: Path) -> None:
    from dtgpt.inference.memory_report import describe_generation
    from dtgpt.planning.report import describe_plan

    _check_options(own, given)
    recipe = settle(recipe, given)
    for name in own.plans:
        parse_alternatives(name, recipe.plans)
    checked(recipe)
    if own.plans or len(own.world) > 1:
        _table([replace(recipe, plan=name) for name in dict.fromkeys(own.plans or (recipe.plan,))], own)
        return
    world = own.world[0] if own.world else None
    choice, settings = recipe.planned_choice(world), recipe.planned(world)
    for line in [*choice.describe(), *choice.explain()]:
        say(line)
    say(describe_plan(settings, recipe.name, recipe.notes(choice, settings.device.type), own.gpu))
    if own.inference_slots:
        say(f"\n{describe_generation(settings, own.inference_slots, own.gpu)}")


def _check_options(own: PlanOptions, given: Options) -> None:
    """Raise UserError where options do not go together."""
    if own.plans and "plan" in given:
        raise UserError(f"--plan {given['plan'][0]} and --plans are both given; name all plans in --plans")
    several = "--plans" if own.plans else "several numbers of --world" if len(own.world) > 1 else None
    if several and own.inference_slots is not None:
        raise UserError(
            f"--inference_slots is about one plan, but {several} make a table; give one --plan and one --world"
        )


def _table(recipes: list[Recipe], own: PlanOptions) -> None:
    """Print a line for each recipe, of which only plans differ, and number of processes. Raises UserError where all of
    them are refused."""
    from dtgpt.planning.table import PlannedCase, describe_table

    cases, refused, notes = [], [], []
    for recipe in recipes:
        for world in dict.fromkeys(own.world) or (None,):
            try:
                choice, settings = recipe.planned_choice(world), recipe.planned(world)
            except UserError as error:
                refused.append(
                    f"{recipe.plan} on {counted(world, 'process', 'processes')}: {error}" if world else str(error)
                )
                continue
            cases.append(PlannedCase(choice.name, settings))
            notes += choice.describe()[1:] + recipe.notes(choice, settings.device.type)
    if not cases:
        raise UserError(refused[0])
    notes = [f"refused: {reason}" for reason in refused] + [f"note: {note}" for note in dict.fromkeys(notes)]
    say(describe_table(recipes[0].name, cases, notes, own.gpu))


command = RecipeCommand("plan RECIPE.py", PlanOptions, plan, "recipes/gpt2_345m.py --plan tp2_pp2")
