"""What a run is, decided before its processes meet: the recipe to train, where the run goes on, and the plan."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dtgpt.checkpoint.load import check_same_model
from dtgpt.checkpoint.open import open_training
from dtgpt.config.plan_choice import AUTO, OR, PlanChoice
from dtgpt.config.recipe import RUN_NAME, Recipe
from dtgpt.data.checks import check_data, with_tokenizer
from dtgpt.data.open import format_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import TrainingSource
from dtgpt.run.folder import read_recipe, run_to_resume, saved_value
from dtgpt.train.own_tokenizer import model_to_begin_with, with_own_tokenizer
from dtgpt.util import seams
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.field_types import check_value
from dtgpt.util.storage import parse_json, read_regular


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run begins: with a checkpoint of `run`, with the `foreign` run of another library, or, without either,
    with new weights or those that the recipe's `init_from` names."""

    run: Path | None = None
    checkpoint: Path | None = None  # the one that the user named; None: the newest that is whole
    foreign: TrainingSource | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that can be started: every value was checked, as far as one process can."""

    recipe: Recipe  # with a number of steps, and the tokenizer that `auto` means
    resume: ResumePoint
    choice: PlanChoice


def find_resume_point(resume: str | None, runs: str, name: str, vocab_size: int) -> ResumePoint:
    """Return where a run goes on by the values of its recipe, which need not be checked yet. `vocab_size`: of the
    model. Raises UserError where `resume` names neither a run nor a checkpoint, or one that cannot be read."""
    if not resume:
        return ResumePoint()
    if (foreign := open_training(resume, vocab_size)) is not None:
        return ResumePoint(foreign=foreign)
    check_value("name", name, RUN_NAME)  # by which `auto` searches
    run, checkpoint = run_to_resume(resume, Path(runs), name)
    return ResumePoint(run=run, checkpoint=checkpoint)


def make_job(recipe: Recipe, resume: ResumePoint, world: int, retry: str | None = None) -> Job:
    """Return the job of `world` processes.

    retry: a command that starts as many processes as are written after it, for the message where the plan needs more.
    Raises UserError, one sentence, on the first value that cannot be trained with, or that does not fit the data, the
    run that goes on or the number of processes.
    """
    if resume.run is not None:
        check_data_of_run(resume.run, recipe.data.path)
    recipe = checked(recipe)
    if resume.run is None and (resume.foreign is not None or recipe.init_from is None):
        for section in recipe.sections:
            section.check_new_weights()
    recipe = with_plan(recipe, world)
    if resume.foreign is not None:
        check_foreign(resume.foreign, recipe.model, recipe.num_steps)
    try:
        choice = recipe.choose_plan(world)
    except UserError as error:
        reason, needed = str(error), recipe.fewest_processes()
        if resume.run is not None and saved_value(read_recipe(resume.run), "plan") == recipe.plan:
            reason += f"; plan={recipe.plan} is that of the run: give --plan for another one"
        raise UserError(f"{reason}; such as: {retry} {needed}" if retry and needed > world else reason) from None
    return Job(recipe=recipe, resume=resume, choice=choice)


def check_data_of_run(run: Path, path: str | None) -> None:
    """Raise UserError where a run goes on with data that are not here, and say where it was started: a path counts from
    there."""
    if path is None or os.path.exists(path):
        return
    form = format_of(path)
    if (form is not None and form.is_here(path)) or path != saved_value(read_recipe(run), "data.path"):
        return
    try:
        start = parse_json(read_regular(run / "environment.json"))
        where = f"{start['folder']} on {start['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # of an older version
        where = "another folder"
    raise UserError(
        f"data.path={path}, which {run} was trained on, is not here; the run was started in {shown_name(where)}: go on "
        "from there, or give --data.path"
    )


def checked(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of steps and the tokenizer that it means. Raises UserError, one sentence, on
    the first value that cannot be trained with, or that does not fit the data."""
    recipe.validate()
    begin = model_to_begin_with(recipe.init_from, recipe.resume)
    recipe = with_own_tokenizer(recipe)
    check_data(recipe.data, recipe.model.vocab_size, begin)
    recipe = with_steps(recipe)
    return replace(recipe, data=with_tokenizer(recipe.data, recipe.model.vocab_size))


def with_steps(recipe: Recipe, first_step: int = 0, first_sample: int = 0) -> Recipe:
    """Return the run with `steps` in place of `train_samples`, as `Recipe.counted` does. The order of prepared data
    depends on the number of samples asked for, which is therefore kept."""
    data = recipe.data
    if recipe.train_samples is not None and data.train_samples is None and format_of(data.path) is not None:
        data = replace(data, train_samples=recipe.train_samples)
    return replace(recipe.counted(first_step, first_sample), data=data)


def with_plan(recipe: Recipe, world: int) -> Recipe:
    """Return the recipe with the plan that a capability chooses for `world` processes where it leaves that open."""
    if OR in recipe.plan or recipe.plan == AUTO:  # else nothing is imported
        for choose in seams.listed("plan_choices"):
            recipe = choose(recipe, world)
    return recipe


def check_foreign(run: TrainingSource, model: ModelConfig, steps: int) -> None:
    """Raise UserError where the run of another library is of another model than `model`, or has done all `steps`."""
    held = run.config if run.config.learns_positions else replace(run.config, seq_length=model.seq_length)
    check_same_model(run.path, held, model)
    if (done := run.state["step"]) >= steps:
        raise UserError(f"{run.path} has already done {counted(done, 'step')}; raise --steps to go on")
