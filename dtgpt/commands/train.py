"""`dtgpt train`: train the model of a recipe; what a recipe file run as a script does too.

All that can be wrong with a recipe, its data and its plan is told before the modules that train are imported, which
takes seconds, and before processes meet: `prepare` makes the `Job`, and `dtgpt.train.loop` runs it.
"""

import shlex
import sys
from collections.abc import Callable
from functools import partial

from dtgpt.commands.command import HELP, help_text, usage_of, usage_of_file, wants_help
from dtgpt.config.overrides import Options, explain_for, read_words, take
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, named_kind, of_kind, recipe_module
from dtgpt.train.start import Job, find_resume_point, make_job, settle_at
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import check_fields
from dtgpt.util.peers import Process
from dtgpt.util.seams import Launch

DOC = """Train the model of a recipe file. `python RECIPE.py` does the same. Started by `torchrun --nproc-per-node N
RECIPE.py`, it trains in N processes.

Every other option replaces a value of the recipe."""
TrainOptions: type[Launch] = next(iter(seams.listed("launches")), Launch)


def train_recipe(recipe_function: Callable, doc: str, words: list[str], file: str | None = None) -> int:
    """Train `recipe_function()` with the options in `words`, or print them if help is asked for. file: that of the
    recipe if `dtgpt train` was given it; None where the file runs as a script. Raises UserError."""
    recipe = of_kind(call_recipe(recipe_function), named_kind(words))
    usage = usage_of(f"train {file}") if file else usage_of_file(recipe.name)
    if wants_help(words):
        say(help_text(doc, usage, TrainOptions, recipe, words=words))
        return 0
    explain = explain_for(recipe.model.architecture)
    try:
        _, given = read_words(words, TrainOptions, recipe, aliases=TrainOptions.aliases, explain=explain)
    except UserError as error:
        more = "".join(each.more(str(error)) for each in seams.listed("explanations"))
        raise UserError(f"{error}{more}") from None
    own = take(TrainOptions(), given)  # what is left in `given` are the recipe's
    check_fields(own, "--")
    program = ["-m", "dtgpt", "train", file] if file else [sys.argv[0]]
    code = own.start([*program, *words], partial(prepare, recipe, given))
    if code is not None:
        return code
    retry = f"{usage} {shlex.join([*words, own.next_word])}" if own.next_word else None
    job = prepare(recipe, given, Process.from_environment().world, retry)
    # Here, since what is wrong is said before seconds are spent on importing the rest.
    from dtgpt.train.loop import run

    return run(job)


def prepare(file: Recipe, options: Options, world: int, retry: str | None = None) -> Job:
    """Return the job of a recipe file with the values of `options` in `world` processes. retry: a command that starts
    as many processes as are written after it. Raises UserError."""
    given, asked = set(options), take(file, options)
    resume = find_resume_point(asked.resume, asked.runs, asked.name, asked.model.vocab_size)
    return make_job(settle_at(resume, file, asked, given), resume, world, retry)


def command(words: list[str]) -> int:
    """Run `dtgpt train RECIPE.py [--option value ...]`. Raises UserError."""
    if words and words[0] in HELP:
        say(help_text(DOC, usage_of("train RECIPE.py"), TrainOptions, Recipe, words=words))
        return 0
    module = recipe_module(words, "train")
    return train_recipe(module.recipe, module.__doc__ or "", words[1:], words[0])
