"""The commands that read a recipe file and do not train its whole run: `dtgpt plan`, `dtgpt compare`, and `--help`."""

from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Annotated

from dtgpt.console import say
from dtgpt.errors import UserError
from dtgpt.help import help_text, wants_help
from dtgpt.megatron_options import explain
from dtgpt.overrides import as_words, read_words, take
from dtgpt.recipe import Recipe
from dtgpt.recipe_file import call_recipe, load_recipe, recipe_module, with_options

TRAIN_HELP = """Train the model of a recipe file. `python RECIPE.py` does the same, and `torchrun --nproc-per-node N
RECIPE.py` trains in N processes.

Every option replaces a value of the recipe."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Show what a recipe needs under a plan: memory of each rank, messages of a step, idle time of a pipeline. It needs
    no GPU and starts no process.

    Options of the recipe, such as --plan and --micro_batch_size, may be added.
    """

    world: Annotated[int | None, "number of processes; none: the fewest that the plan needs"] = None
    gpu: Annotated[str | None, "a GPU such as H100, or its memory in GiB; none: this machine's, else H200"] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Run the same steps under each plan and on one process, and compare losses, gradients and weights. The exit code
    is 1 where a plan differs by more than the tolerance.

    Options of the recipe may be added; --steps are those of the comparison.
    """

    plans: Annotated[tuple[str, ...], "plans to compare with one process"] = ()
    steps: Annotated[int, "optimizer steps under each plan"] = 5
    tolerance: Annotated[float | None, "largest relative difference that is accepted; none: by precision"] = None


def plan_command(words: list[str]) -> int:
    if wants_help(words):
        return recipe_help("plan", words, PlanOptions)
    recipe = call_recipe(recipe_module(words, "plan").recipe)
    _, options = read_words(words[1:], PlanOptions, recipe, explain=explain)
    own = take(PlanOptions(), options)
    if own.world is not None and not 1 <= own.world < 10**9:
        raise UserError(f"--world {own.world} is no number of processes; use 1 or more")
    from dtgpt.planning.report import describe_plan

    say(describe_plan(with_options(recipe, options), own.world, own.gpu))
    return 0


def compare_command(words: list[str]) -> int:
    if wants_help(words):
        return recipe_help("compare", words, CompareOptions)
    recipe = call_recipe(recipe_module(words, "compare").recipe)
    _, options = read_words(words[1:], CompareOptions, recipe, explain=explain)
    if "plan" in options:
        raise UserError("dtgpt compare takes several plans; write --plans")
    own = take(CompareOptions(), options)
    if not own.plans:
        raise UserError("dtgpt compare needs plans, such as --plans tp2 pp2 tp2_pp2")
    given = as_words(options)
    from dtgpt.compare import compare

    return compare(with_options(recipe, options), Path(words[0]), list(own.plans), own.steps, own.tolerance, given)


def record_command(words: list[str]) -> int:
    """Run `dtgpt record RECIPE.py FILE STEPS [--option value ...]`, which `dtgpt compare` starts in each process."""
    from dtgpt.compare import save_record

    if len(words) < 3:
        raise UserError("dtgpt record is what dtgpt compare starts; use dtgpt compare")
    path, file, steps, *options = words
    return save_record(load_recipe(Path(path), options), Path(file), int(steps))


def recipe_help(command: str, words: list[str], own: type | None = None) -> int:
    """Print the command's `own` options and those of recipes: of the recipe file among `words`, if there is one."""
    files = [word for word in words if word.endswith(".py")]
    recipe = call_recipe(recipe_module(files, command).recipe) if files else Recipe
    usage, refused = f"dtgpt {command} RECIPE.py", ("plan", "resume") if command == "compare" else ()
    text = help_text(own, getdoc(own), usage, recipe, without=refused) if own else help_text(recipe, TRAIN_HELP, usage)
    say(text)
    return 0
