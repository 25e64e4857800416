"""`dtgpt plan`: what a recipe needs under a plan."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from dtgpt.config.execution import MOST_SLOTS, choose_dtype
from dtgpt.config.overrides import Options
from dtgpt.config.plan_choice import AUTO, parse_alternatives
from dtgpt.config.recipe import Recipe
from dtgpt.optim.fp8.precision import FP8
from dtgpt.planning.auto import AutoPlan, machine, with_choice
from dtgpt.planning.gpus import Gpu, find_gpu
from dtgpt.tools.recipes import RecipeCommand
from dtgpt.train.start import checked, settle, with_steps
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds
from dtgpt.util.shared.gpu_limits import what_runs_on


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Show what a recipe needs under a parallel plan: the memory of each rank, the messages of a step, the idle time of
    a pipeline, and the time of a step and of the run. No GPU is needed, and no process is started.

    Several plans or numbers of processes make one table. --plan auto ranks all plans.

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
    network: Annotated[
        float | None,
        "GB/s that a GPU can send to another host; none: as in hosts that are sold with it",
        Bounds(above=0),
    ] = None
    inference_slots: Annotated[
        int | None, "show the memory to generate this number of texts at the same time, too", Bounds(1, MOST_SLOTS)
    ] = None


def plan(recipe: Recipe, own: PlanOptions, given: Options, path: Path) -> None:
    from dtgpt.planning.generation import describe_generation
    from dtgpt.planning.report import describe_plan

    _check_options(own, given)
    recipe = settle(recipe, given)
    for name in own.plans:
        if name != AUTO:
            parse_alternatives(name, recipe.plans)
    recipe = with_steps(checked(recipe))
    gpu = _cpu(own) if recipe.device == "cpu" else _gpu(recipe.precision == FP8, own)
    if gpu.capability is not None and recipe.device != "cpu":
        dtype = choose_dtype(recipe.precision, torch.device("cuda"))
        caution = what_runs_on(gpu.name, gpu.capability, dtype, recipe.attention, recipe.model.dropout)
        if caution:
            say(caution, warning=True)
    if own.plans or len(own.world) > 1:
        _table([replace(recipe, plan=name) for name in dict.fromkeys(own.plans or (recipe.plan,))], own, gpu)
        return
    world = own.world[0] if own.world else None
    if _is_open(AutoPlan(recipe=recipe, world=world or 1), world):
        recipe = _ranked(recipe, world or 1, gpu)
    choice, settings = recipe.planned_choice(world), recipe.planned(world)
    for line in [*choice.describe(), *choice.explain()]:
        say(line)
    notes = recipe.notes(choice, settings.device.type)
    say(describe_plan(settings, recipe.name, notes, gpu, recipe.num_steps))
    if own.inference_slots:
        say(f"\n{describe_generation(settings, own.inference_slots, gpu)}")


def _check_options(own: PlanOptions, given: Options) -> None:
    """Raise UserError where options do not go together."""
    if own.plans and "plan" in given:
        raise UserError(f"--plan {given['plan'][0]} and --plans are both given; name all plans in --plans")
    several = "--plans" if own.plans else "several numbers of --world" if len(own.world) > 1 else None
    if several and own.inference_slots is not None:
        raise UserError(
            f"--inference_slots is about one plan, but {several} make a table; give one --plan and one --world"
        )


def _is_open(auto: AutoPlan, world: int | None) -> bool:
    """Return whether a plan for `world` processes is to be chosen; None: whether nothing but auto is given."""
    return auto.is_open() if world else auto.recipe.plan == AUTO


def _cpu(own: PlanOptions) -> Gpu:
    """Return what a process on this machine's CPU has. Raise UserError for options about GPUs."""
    for name in ("gpu", "network"):
        if (value := getattr(own, name)) is not None:
            raise UserError(f"--{name} {value} is about a GPU, and device=cpu plans for a CPU; leave one of them out")
    return machine("cpu", max(own.world, default=1))


def _gpu(fp8: bool, own: PlanOptions) -> Gpu:
    """Return the GPU that the options name, with the network that they name."""
    gpu = find_gpu(own.gpu, fp8)
    if own.network is None:
        return gpu
    if gpu.rates is None:
        raise UserError(
            f"--network is {own.network:g}, but --gpu {own.gpu or gpu.name} names no GPU whose other rates are known; "
            "name one, such as --gpu H100"
        )
    return replace(gpu, rates=replace(gpu.rates, network=own.network * 1e9))


def _ranked(recipe: Recipe, world: int, gpu: Gpu) -> Recipe:
    """Print the plans of `world` processes by the time of a step, and return the recipe with the first."""
    from dtgpt.planning.report import describe_ranking

    found = AutoPlan(recipe=recipe, world=world, gpu=gpu).ranking()
    say("\n".join(describe_ranking(found, gpu, world)))
    return with_choice(recipe, found.best)


def _table(recipes: list[Recipe], own: PlanOptions, gpu: Gpu) -> None:
    """Print a line for each recipe, of which only plans differ, and number of processes. Raises UserError where all of
    them are refused."""
    from dtgpt.planning.report import PlannedCase, describe_table

    cases, refused, notes = [], [], []
    for recipe in recipes:
        for world in dict.fromkeys(own.world) or (None,):
            try:
                if _is_open(AutoPlan(recipe=recipe, world=world or 1), world):
                    raise UserError(
                        f"--plan {shown(recipe.plan)} is to be chosen, and a table has plans that are named; give one "
                        "--world and no --plans to rank all plans"
                    )
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
    say(describe_table(recipes[0].name, cases, notes, gpu))


command = RecipeCommand("plan RECIPE.py", PlanOptions, plan, "recipes/gpt2_345m.py --plan tp2_pp2")
