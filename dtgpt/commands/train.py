"""`dtgpt train`: train the model of a recipe; what a recipe file run as a script does too."""

import io
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated

from dtgpt.commands.help import HELP, recipe_help, usage_of, usage_of_file, wants_help
from dtgpt.commands.launcher import launch
from dtgpt.config.overrides import Options, explain_for, read_words, take
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, named_kind, of_kind, recipe_module
from dtgpt.train.start import Job, find_resume_point, make_job, settle_at
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, check_fields
from dtgpt.util.peers import VARIABLES, Process

DOC = """Train the model of a recipe file. `python RECIPE.py` does the same. With --nproc N, or started by `torchrun
--nproc-per-node N RECIPE.py`, it trains in N processes.

Every other option replaces a value of the recipe."""
MOST = 1024  # processes on a machine


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    nproc: Annotated[
        int | None, "number of processes to start on this machine; none: one, or those of torchrun", Bounds(1, MOST)
    ] = None  # fmt: skip


def train_recipe(recipe_function: Callable, doc: str, words: list[str], file: str | None = None) -> int:
    """Train `recipe_function()` with the options in `words`, or print them if help is asked for. file: that of the
    recipe if `dtgpt train` was given it; None where the file runs as a script. Raises UserError."""
    recipe = of_kind(call_recipe(recipe_function), named_kind(words))
    usage = usage_of(f"train {file}") if file else usage_of_file(recipe.name)
    if wants_help(words):
        say(recipe_help(words, doc, usage, TrainOptions, recipe))
        return 0
    explain = explain_for(recipe.model.architecture)
    try:
        _, given = read_words(words, TrainOptions, recipe, aliases={"nproc_per_node": "nproc"}, explain=explain)
    except UserError as error:
        more = "".join(each.more(str(error)) for each in seams.listed("explanations"))
        raise UserError(f"{error}{more}") from None
    own = take(TrainOptions(), given)
    check_fields(own, "--")
    options = {name: value for name, value in given.items() if name != "nproc"}
    process = Process.from_environment()
    started = any(name in os.environ for name in VARIABLES.values())
    if own.nproc and started and own.nproc != process.local_world:
        raise UserError(
            f"--nproc is {own.nproc}, but another launcher, such as torchrun, started {process.local_world} processes "
            "on this machine; leave --nproc out"
        )
    if own.nproc and not started and own.nproc > 1:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the processes say it again
            prepare(recipe, options, own.nproc)
        program = ["-m", "dtgpt", "train", file] if file else [sys.argv[0]]
        return launch([*program, *words], own.nproc)
    retry = None if started or own.nproc else f"{usage} {shlex.join([*words, '--nproc'])}"
    job = prepare(recipe, options, process.world, retry)
    from dtgpt.train.loop import run

    return run(job)


def prepare(file: Recipe, options: Options, world: int, retry: str | None = None) -> Job:
    """Return the job of a recipe file with the values of `options`, before seconds are spent on importing the rest.
    `world`, `retry`: as in `make_job`. Raises UserError."""
    given, asked = set(options), take(file, options)
    resume = find_resume_point(asked.resume, asked.runs, asked.name, asked.model.vocab_size)
    return make_job(settle_at(resume, file, asked, given), resume, world, retry)


def command(words: list[str]) -> int:
    """Run `dtgpt train RECIPE.py [--option value ...]`. Raises UserError."""
    if words and words[0] in HELP:
        say(recipe_help(words, DOC, usage_of("train RECIPE.py"), TrainOptions, Recipe))
        return 0
    module = recipe_module(words, "train")
    return train_recipe(module.recipe, module.__doc__ or "", words[1:], words[0])
