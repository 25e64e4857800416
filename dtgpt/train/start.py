"""The start of a run: which recipe it has, what is refused before its processes meet, and what it is made of.

Read from the top: what a run begins with; the recipe that a command works on (its file, its options, and what a run
that goes on keeps); the checks, which make it a `Job`. Whatever is wrong is refused here, in one sentence, before a run
folder is made or changed. What only some runs need is asked of whoever owns it: of a run folder its `recipe.json`, of
another model (`Beginning`) its tokenizer, its dimensions and its weights.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.config.overrides import Options, explain_for, read_words, take
from dtgpt.config.plan_choice import AUTO, OR, PlanChoice
from dtgpt.config.recipe import RUN_NAME, Recipe
from dtgpt.config.recipe_file import call_recipe, load_module, named_kind, of_kind
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import DataConfig, Section
from dtgpt.data.open import check_data, format_of, with_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.run.folder import run_to_resume
from dtgpt.run.saved_recipe import read_recipe, recipe_of_run, saved_value
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import check_value

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer


class Beginning:
    """What a run begins with, beside the checkpoint with which it may go on. Here: new weights. Capabilities have those
    of other models, and runs of other libraries."""

    path: Path | None = None  # of the other model

    def settle(self, asked: Recipe, given: Collection[str]) -> Recipe:
        """Return the recipe to work on: `asked`, with what the other model decides, but for the options `given`."""
        return asked

    def with_tokenizer(self, data: DataConfig, model: ModelConfig) -> DataConfig:
        """Return the data with the tokenizer of the other model, where nothing names theirs."""
        return data

    def check(self, sections: Collection[Section], model: ModelConfig, steps: int) -> None:
        """Raise UserError where a new run with these sections, model and number of steps cannot begin so."""
        for section in sections:
            section.check_new_weights()

    def beside(self, checkpoint: Checkpoint, freezes: bool) -> "Beginning":
        """Return what a run needs beside its checkpoint. freezes: whether it trains other weights than the model's."""
        return self

    def model_of_ends(self, data: DataConfig, tokenizer: Tokenizer) -> Path | None:
        """Return the model whose texts end as those of the run. Raise UserError where it has another tokenizer."""
        return None

    def give_weights(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        """Fill the shards, whose weights are not drawn where there is a `path`. sizes: those of the batches of a run
        that goes on at a step, after a number of samples."""

    def save(self, own: type[ModelConfig], tokenizer: Tokenizer, run: Path) -> None:
        """Write into the folder of a new run what it keeps of the other model. own: class of its model."""


def beginning(
    init_from: str | None, resume: str | Path | None, vocab_size: int, sections: Collection[Section] = ()
) -> Beginning:
    """Return what a run begins with. Arguments as of a recipe, but that `resume` may be the run that was found.
    vocab_size: of its model. sections: those that may change it."""
    found = None
    if init_from or resume:  # else nothing is imported
        found = seams.ask("beginnings", lambda begin: begin(init_from, resume, vocab_size))
    if init_from and found is None:
        raise UserError(f"init_from={init_from} needs a capability that begins with other models; leave it out")
    return reduce(lambda begin, section: section.changed_beginning(begin, resume), sections, found or Beginning())


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The `run` that goes on, None: a new one begins."""

    run: Path | None = None
    checkpoint: Path | None = None  # the one that the user named; None: the newest that is whole


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that can be started: every value was checked, as far as one process can."""

    recipe: Recipe  # with a number of steps, and the tokenizer that `auto` means
    resume: ResumePoint
    begin: Beginning
    choice: PlanChoice


# The recipe to work on.


def load_recipe(path: Path, options: list[str]) -> Recipe:
    """Return the recipe of a file with the overrides `options`."""
    return override(call_recipe(load_module(path).recipe), options)


def override(file: Recipe, words: list[str]) -> Recipe:
    """Return the recipe to work on with the options in `words`. A UserError explains options of other programs."""
    file = of_kind(file, named_kind(words))
    return settle(file, read_words(words, file, explain=explain_for(file.model.architecture))[1])


def settle(file: Recipe, options: Options) -> Recipe:
    """Return the recipe to work on: that of the recipe file with the values of `options`, which this takes out of
    `options`. Raises UserError where a run to resume or a model to begin with is not as it must be."""
    given, asked = set(options), take(file, options)
    resume = find_resume_point(asked.resume, asked.runs, asked.name, asked.model.vocab_size)
    return settle_at(resume, file, asked, given)


def find_resume_point(resume: str | None, runs: str, name: str, vocab_size: int) -> ResumePoint:
    """Return where a run goes on by the values of its recipe, which need not be checked yet. `vocab_size`: of the
    model. Raises UserError where `resume` names neither a run nor a checkpoint, or one that cannot be read."""
    if not resume or beginning(None, resume, vocab_size).path is not None:  # of another library
        return ResumePoint()
    check_value("name", name, RUN_NAME)  # by which `auto` searches
    run, checkpoint = run_to_resume(resume, Path(runs), name)
    return ResumePoint(run=run, checkpoint=checkpoint)


def settle_at(resume: ResumePoint, file: Recipe, asked: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe to work on, of a run that begins at `resume`. `asked`: the recipe of `file` with the values of
    the options `given`. Raises UserError where the run or the model to begin with is not as it must be."""
    # A run that goes on keeps its own recipe; of the file it takes what an older version of dtgpt did not have.
    if (run := resume.run) is not None:
        recipe = recipe_of_run(run, file, asked, given, lambda file: checked(file) and with_steps(file))
        if recipe.train_samples is None:
            return recipe
        missing = "train_samples of a run that goes on needs a capability, which is not here; give --steps"
        return seams.first("sample_counts", missing).count_on(recipe, run, resume.checkpoint)
    return beginning(asked.init_from, asked.resume, asked.model.vocab_size, asked.sections).settle(asked, given)


def with_steps(recipe: Recipe, first_step: int = 0, first_sample: int = 0) -> Recipe:
    """Return the run with `steps` in place of `train_samples`, counted from `first_step` and `first_sample` on. The
    order of prepared data depends on the number of samples asked for, which is therefore kept."""
    data = recipe.data
    if recipe.train_samples is not None and data.train_samples is None and format_of(data.path) is not None:
        data = replace(data, train_samples=recipe.train_samples)
    return replace(recipe.counted(first_step, first_sample), data=data)


# The checks of one process.


def make_job(recipe: Recipe, resume: ResumePoint, world: int, retry: str | None = None) -> Job:
    """Return the job of `world` processes.

    retry: a command that starts as many processes as are written after it, for the message where the plan needs more.
    Raises UserError, one sentence, on the first value that cannot be trained with, or that does not fit the data, the
    run that goes on or the number of processes.
    """
    # In this order: a user who moved to another folder reads of the data, and not of what follows from their absence;
    # the plan comes last, since it depends on model, batch and tokenizer, whose mistakes have clearer sentences.
    for check in seams.listed("kept_data") if resume.run is not None else ():
        check(resume.run, recipe.data.path)
    recipe = checked(recipe)
    begin = beginning(recipe.init_from, recipe.resume or resume.run, recipe.model.vocab_size, recipe.sections)
    if resume.run is None:
        begin.check(recipe.sections, recipe.model, recipe.num_steps)
    recipe = with_plan(recipe, world)
    try:
        choice = recipe.choose_plan(world)
    except UserError as error:
        told, needed = tell_plan(str(error), recipe.plan, resume.run), recipe.fewest_processes()
        raise UserError(f"{told}; such as: {retry} {needed}" if retry and needed > world else told) from None
    return Job(recipe=recipe, resume=resume, begin=begin, choice=choice)


def checked(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of steps and the tokenizer that it means. Raises UserError, one sentence, on
    the first value that cannot be trained with, or that does not fit the data."""
    recipe.validate()
    vocab_size = recipe.model.vocab_size
    begin = beginning(recipe.init_from, recipe.resume, vocab_size, recipe.sections)
    data = begin.with_tokenizer(recipe.data, recipe.model)
    check_data(data, vocab_size, begin.path)
    recipe = with_steps(replace(recipe, data=data))
    return replace(recipe, data=with_tokenizer(recipe.data, vocab_size))


def with_plan(recipe: Recipe, world: int) -> Recipe:
    """Return the recipe with the plan that a capability chooses for `world` processes where it leaves that open."""
    if OR in recipe.plan or recipe.plan == AUTO:  # else nothing is imported
        for choose in seams.listed("plan_choices"):
            recipe = choose(recipe, world)
    return recipe


def tell_plan(reason: str, plan: str, run: Path | None) -> str:
    """Return the reason for which a plan is refused, and what to do where it is that of the `run` that goes on."""
    if run is not None and saved_value(read_recipe(run), "plan") == plan:
        return f"{reason}; plan={plan} is that of the run: give --plan for another one"
    return reason
