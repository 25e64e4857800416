"""Which recipe a command works on: that of its file with the options of the command line, of which a run that goes on
keeps its own values, and a run that begins with given weights takes the dimensions of their model."""

import os
import shlex
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import FREE, check_optimizer, check_same_architecture
from dtgpt.checkpoint.manifest import as_tuple, list_checkpoints, read_state, step_of
from dtgpt.checkpoint.open import open_config
from dtgpt.config.overrides import LARGEST, Options, explain_for, leaves, read_words, replace_values, take, value_text
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, load_module
from dtgpt.config.sections import OptimizerConfig
from dtgpt.data.open import format_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import TrainingSource
from dtgpt.optim.kinds import kinds, named_kind, of_kind
from dtgpt.run.folder import ABSENT, AUTO, OF_ONE_START, read_recipe, saved_value
from dtgpt.train.job import ResumePoint, checked, find_resume_point, with_steps
from dtgpt.train.own_tokenizer import named_by_option
from dtgpt.util.console import counted, hanging, say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import kinds_of, misfit

# What a recipe file leaves to the run: the tokenizer of its data, or of the model that it began with.
TAKEN = (("data.tokenizer", "auto"), ("data.tokenizer_file", None))


def load_recipe(path: Path, options: list[str]) -> Recipe:
    """Return the recipe of a file with the overrides `options`."""
    return override(call_recipe(load_module(path).recipe), options)


def override(file: Recipe, words: list[str]) -> Recipe:
    """Return the recipe to work on with the options in `words`. A UserError explains options of other
    programs."""
    file = of_kind(file, named_kind(words))
    return settle(file, read_words(words, file, explain=explain_for(file.model.architecture))[1])


def settle(file: Recipe, options: Options) -> Recipe:
    """Return the recipe to work on: that of the recipe file with the values of `options`, which this takes out of
    `options`. Raises UserError where a run to resume or a model to begin with is not as it must be."""
    given, asked = set(options), take(file, options)
    resume = find_resume_point(asked.resume, asked.runs, asked.name, asked.model.vocab_size)
    return settle_at(resume, file, asked, given)


def settle_at(resume: ResumePoint, file: Recipe, asked: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe to work on, as `settle` does, for a run that begins at `resume`. `asked`: the recipe of `file`
    with the values of the options `given`."""
    if resume.foreign is not None:
        return _recipe_of_foreign_run(resume.foreign, named_by_option(asked, given), given)
    if (run := resume.run) is not None:
        recipe = recipe_of_run(run, file, asked, given)
        return recipe if recipe.train_samples is None else _counted_on(recipe, run, resume.checkpoint)
    if asked.init_from:
        values = model_values(Path(asked.init_from), asked.model, given, asked.sample_length)
        return replace_values(named_by_option(asked, given), values)
    return asked


def recipe_of_run(run: Path, file: Recipe, asked: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe with which `run` goes on: its own, with the values of `asked` for the options `given` and for
    the fields of OF_ONE_START. What an older run does not have, and `plans`, are the recipe file's."""
    saved, kept = read_recipe(run), {}
    kind = saved_value(saved, "optimizer.kind")
    kind = OptimizerConfig.kind if kind is ABSENT else kind
    if "optimizer.kind" not in given and {kind, asked.optimizer.kind} <= kinds().keys():
        if kind != asked.optimizer.kind:
            say(f"{run} goes on with its optimizer, {kind}, not {asked.optimizer.kind} as the recipe file says")
        file, asked = of_kind(file, kind), of_kind(asked, kind)
    takes = asked.optimizer.takes
    check_optimizer(run, kind, asked.optimizer.kind, takes)
    if kind in takes:
        origins = {own: f"as its {theirs}" if theirs else "at zero" for own, theirs in takes[kind].items()}
        told = " and ".join(f"{own} begins {origin}" for own, origin in origins.items()) or "the states are the same"
        say(f"{run} was trained with optimizer.kind={kind} and goes on with {asked.optimizer.kind}: {told}")
    try:
        unknown = list(_unknown(saved, {name for name, *_ in leaves(file)}))
    except ValueError as error:
        raise UserError(f"{run}/recipe.json says {error}; mend it") from None
    for name, type_, *_ in leaves(file):
        found = saved_value(saved, name)
        if name in given or name in OF_ONE_START or found is ABSENT:
            continue
        try:
            kept[name] = _checked(found, type_)
        except ValueError as error:
            raise UserError(f"{run}/recipe.json says {name}={shown(found)}, {error}; give --{name}") from None
    # Older versions wrote out what `none` and `auto` mean.
    older = saved_value(saved, "exit_interval") is ABSENT
    if older and kept.get("optimizer.decay_steps") == saved_value(saved, "steps"):
        kept["optimizer.decay_steps"] = None
    if kept.get("data.tokenizer_file") is not None and "data.tokenizer" in kept:
        kept["data.tokenizer"] = "auto"
        if not Path(kept["data.tokenizer_file"]).exists():  # the run carries it
            kept["data.tokenizer_file"] = str(run / "tokenizer.json")
    if "train_samples" in given:  # in place of what those of the run became: see `Recipe.counted`
        for name in {"steps", "optimizer.decay_samples"} - set(given):
            kept.pop(name, None)
        asked = asked if "steps" in given else replace(asked, steps=None)
    if unknown:
        say(f"{run}/recipe.json has {', '.join(unknown)}, which this dtgpt does not know and ignores", warning=True)
    if file.train_samples is not None:
        checked(file)
        file = with_steps(file)
    fixed = {each.name for each in fields(file) if getattr(getattr(file, each.name), "fixed", False)}
    _say_kept({name: attrgetter(name)(file) for name in kept}, kept, fixed)
    resume = str(run) if asked.resume == AUTO else asked.resume
    recipe = replace(replace_values(asked, kept), resume=resume)
    # Where the model's own weights are trained, those of the run stay.
    takes_base = "init_from" in given and (asked.resume != AUTO or recipe.freezes_weights)
    return recipe if takes_base else replace(recipe, init_from=None)


def _counted_on(recipe: Recipe, run: Path, chosen: Path | None) -> Recipe:
    """Return the recipe of a resumed run with `steps` in place of `train_samples`: those of its checkpoint, and as many
    as the samples after it fill, whatever sizes its steps had."""
    checked(recipe)
    found = chosen or max(list_checkpoints(run / "checkpoints"), key=step_of, default=None)
    try:
        state = read_state(found, own=type(recipe.model)) if found else {}
    except UserError:  # which is told where the run is resumed
        state = {}
    step, seen = state.get("step", 0), state.get("consumed_samples", 0)
    if seen > recipe.train_samples:
        raise UserError(f"{run} has already seen {counted(seen, 'sample')}; raise --train_samples to go on")
    return with_steps(recipe, step, seen)


def _recipe_of_foreign_run(run: TrainingSource, asked: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe with which a run of another library goes on: `asked`, with the dimensions of its model and the
    order of its samples. Say what else that run was asked for."""
    recipe = replace_values(asked, _dimensions(run.path, run.config, asked.model, given, exact=True))
    checked(recipe)
    other = {n: v for n, v in run.values.items() if n not in given and attrgetter(n)(recipe) != v}
    if other:
        changes = [f"  {name}: {value_text(attrgetter(name)(recipe))} -> {value_text(v)}" for name, v in other.items()]
        options = " ".join(f"--{name} {shlex.quote(value_text(value))}" for name, value in other.items())
        lines = [f"{run.path} was trained with other values than the recipe has (recipe -> run):", *changes]
        say("\n".join([*lines, hanging(f"to keep them, give {options}", 2)]))
    step, seen = run.state["step"], run.state["consumed_samples"]
    if recipe.train_samples is not None and seen > recipe.train_samples:
        raise UserError(f"{run.path} has already seen {counted(seen, 'sample')}; raise --train_samples")
    recipe = with_steps(recipe, step, seen)
    if run.order_samples is not None and "data.train_samples" not in given and format_of(recipe.data.path) is not None:
        if recipe.batch_sizes(step, seen).before(recipe.num_steps) <= run.order_samples:
            return replace(recipe, data=replace(recipe.data, train_samples=run.order_samples))
        say(
            f"the run is longer than the {run.order_samples} samples for which {run.path} ordered its data, and may "
            "see them in another order",
            warning=True,
        )
    return recipe


def _say_kept(asked: dict[str, Any], kept: dict[str, Any], fixed: Collection[str]) -> None:
    """Say, in a line for each, which values the recipe file `asked` for that the run has not `kept`. fixed: as of
    `_can_change`."""
    differing = [n for n, value in asked.items() if kept[n] != value and (n, value) not in TAKEN]
    if not differing:
        return
    lines = ["the recipe file says otherwise than the run, which keeps its values (recipe -> run):"]
    for name in differing:
        end = "" if _can_change(name, fixed) else " (cannot change)"
        lines.append(f"  {name}: {value_text(asked[name])} -> {value_text(kept[name])}{end}")
    options = [f"--{name} {shlex.quote(value_text(asked[name]))}" for name in differing if _can_change(name, fixed)]
    if options:
        lines.append(hanging(f"to change {'them' if options[1:] else 'it'}, give {' '.join(options)}", 2))
    say("\n".join(lines))


def _can_change(name: str, fixed: Collection[str]) -> bool:
    """Whether a run can go on with another value of a field: not another model, nor samples or tokens of another
    meaning. fixed: sections of which it keeps all values."""
    section, _, last = name.rpartition(".")
    if section in fixed:
        return False
    return (
        last in FREE
        if section == "model"
        else name not in ("name", "seq_length", "data.tokenizer", "data.bpe_vocab_size")
    )


def _checked(value: Any, hint: Any) -> Any:
    """Return a value from JSON if it fits a field's annotation, else raise ValueError."""
    value = as_tuple(value)
    if wanted := misfit(value, hint):
        raise ValueError(f"which is not {wanted}")
    if isinstance(value, str):
        os.fsencode(value)  # else it cannot be a path: its UnicodeEncodeError is a ValueError
    if type(value) is not int:
        return value
    try:
        if float in kinds_of(hint):
            return float(value)
        if abs(value) <= LARGEST:
            return value
    except OverflowError:
        pass
    raise ValueError("which is too large")


def _unknown(saved: dict[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the names in a recipe.json that no field has. Raises ValueError where a group of fields is none."""
    for key, value in saved.items():
        name = f"{prefix}{key}"
        if any(other.startswith(f"{name}.") for other in known):
            if not isinstance(value, dict):
                raise ValueError(f"{name}={shown(value)}, which must be an object")
            yield from _unknown(value, known, f"{name}.")
        elif name not in known and name != "plans":
            yield name[:60]


def model_values(
    path: Path, asked: ModelConfig, given: Collection[str], sample_length: int | None = None
) -> dict[str, Any]:
    """Return the dimensions of the model at `path` that `asked` does not have, by the names of recipe fields. Raises
    UserError where an option `given` contradicts them, or the architecture is another one. A shorter context is not a
    contradiction, nor is a scaling of rotary positions; where positions are not learned, their number is the recipe's,
    but for one that neither an option nor samples (`sample_length`, None: as many) ask for in spite of the model's."""
    config, samples = open_config(path, type(asked)), sample_length or asked.seq_length
    fits = "model.seq_length" not in given and samples <= config.seq_length < asked.seq_length
    return _dimensions(path, config, asked, given, takes_length=fits)


def _dimensions(
    path: Path, config: ModelConfig, asked: ModelConfig, given: Collection[str], exact: bool = False,
    takes_length: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return as `model_values` does for a model of the shape `config`. exact: where no length of samples is given, it
    is that of the model, and a shorter one is a contradiction where positions are learned. takes_length: the number of
    positions is that of the model although they are not learned."""
    check_same_architecture(path, config, asked)
    takes_length = takes_length or config.learns_positions or (exact and "model.seq_length" not in given)
    own = FREE if takes_length else FREE | {"seq_length"}
    if not exact:
        own = own | {n for n in config.continued if f"model.{n}" in given}
    held = {f"model.{n}": v for n, v in vars(config).items() if n not in own}
    wanted = {name: getattr(asked, name.removeprefix("model.")) for name in held}
    other = [n for n in held if n in given and wanted[n] != held[n]]
    wrong = [n for n in other if exact or n != "model.seq_length" or wanted[n] > held[n]]
    if wrong:
        told = " and ".join(f"--{name} {wanted[name]}, where the model has {held[name]}" for name in wrong)
        raise UserError(f"{path} cannot be begun with {told}; leave {' and '.join(f'--{n}' for n in wrong)} out")
    taken = {n: v for n, v in held.items() if n not in given and v != wanted[n]}
    if taken:
        changes = [f"  {name}: {wanted[name]} -> {value}" for name, value in taken.items()]
        say("\n".join([f"the model has the dimensions of {path} (recipe -> model):", *changes]))
    return taken
