"""`dtgpt train`: train the model of a recipe; what a recipe file run as a script does too."""

from collections.abc import Callable

from dtgpt.commands.help import HELP, help_text, wants_help
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, recipe_module
from dtgpt.parallel.process import Process
from dtgpt.train.settle import check_run, override, plan_error, run_of
from dtgpt.util.console import say
from dtgpt.util.errors import UserError

DOC = """Train the model of a recipe file. `python RECIPE.py` does the same, and `torchrun --nproc-per-node N RECIPE.py`
trains in N processes.

Every option replaces a value of the recipe."""


def train_recipe(recipe_function: Callable, doc: str, words: list[str]) -> int:
    """Train `recipe_function()` with the options in `words`, or print them if help is asked for. Raises UserError."""
    recipe = call_recipe(recipe_function)
    if wants_help(words):
        say(help_text(doc, f"torchrun recipes/{recipe.name}.py", recipe))
        return 0
    recipe = override(recipe, words)
    # Check recipe and plan before spending seconds on importing the rest.
    check_run(recipe)
    try:
        recipe.plan_for(Process.from_environment().world)
    except UserError as error:
        raise plan_error(error, recipe.plan, run_of(recipe.resume, recipe.runs, recipe.name)[0]) from None
    from dtgpt.train.loop import train

    return train(recipe)


def command(words: list[str]) -> int:
    """Run `dtgpt train RECIPE.py [--option value ...]`. Raises UserError."""
    if words and words[0] in HELP:
        say(help_text(DOC, "dtgpt train RECIPE.py", Recipe))
        return 0
    module = recipe_module(words, "train")
    return train_recipe(module.recipe, module.__doc__ or "", words[1:])
