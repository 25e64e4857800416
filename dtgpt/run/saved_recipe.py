"""What recipe.json of a run folder says, and what a run that goes on keeps of it.

A recipe file may have changed since a run began, and a run must not change with it: its curve would part, and nobody
would know why. So a run keeps its own values. Of the file that it is started with again, those count that an option
names, and those of one start (`OF_ONE_START`); all others in which the two differ are said, with the option for each.
Older versions wrote some values in another way, which a capability reads.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import check_optimizer
from dtgpt.checkpoint.manifest import STATE, as_tuple, quarantine_newer
from dtgpt.config.overrides import leaves, replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import kinds, of_kind
from dtgpt.config.sections import OptimizerConfig
from dtgpt.run.folder import AUTO
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_json

ABSENT = object()
LARGEST_RECIPE = 1 << 20  # bytes of a recipe.json
OF_ONE_START = ("resume", "runs", "init_from", "exit_after", "exit_interval")  # fields that a resume does not keep


def read_recipe(folder: Path) -> dict[str, Any]:
    """Return what the run's recipe.json says, unchecked, as a capability translates what older versions wrote.
    Raises UserError if it cannot be read."""
    path, advice = folder / "recipe.json", f'write into it what the newest checkpoint\'s {STATE} has under "recipe"'
    saved = read_json(path, advice, LARGEST_RECIPE)
    if not isinstance(saved, dict):
        raise UserError(f"{path} holds no JSON object; {advice}")
    for translate in seams.listed("older_recipes"):
        translate(saved)
    return saved


def saved_value(saved: dict[str, Any], name: str) -> Any:
    """Return the value of a dotted field name in what `read_recipe` returned, ABSENT where there is none."""
    value: Any = saved
    for part in name.split("."):
        value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def recipe_of_run(
    run: Path, file: Recipe, asked: Recipe, given: Collection[str], counted: Callable[[Recipe], Recipe]
) -> Recipe:
    """Return the recipe with which `run` goes on: its own, with the values of `asked` for the options `given` and for
    the fields of OF_ONE_START. What an older run does not have, and `plans`, are the recipe file's. counted: returns a
    recipe with `steps` in place of `train_samples`, checked."""
    saved = read_recipe(run)
    # The optimizer first: its kind decides which fields there are, and which states of the run it can take.
    kind = saved_value(saved, "optimizer.kind")
    kind = OptimizerConfig.kind if kind is ABSENT else kind
    if "optimizer.kind" not in given and {kind, asked.optimizer.kind} <= kinds().keys():
        if kind != asked.optimizer.kind:
            say(f"{run} goes on with its optimizer, {kind}, not {asked.optimizer.kind} as the recipe file says")
        file, asked = of_kind(file, kind), of_kind(asked, kind)
    _check_states(run, kind, asked.optimizer)
    kept = _kept_values(run, saved, {name: type_ for name, type_, *_ in leaves(file)}, given)
    for counts in seams.listed("sample_counts") if "train_samples" in given else ():
        asked = counts.drop_steps(kept, asked, given)

    # Say what the file has otherwise than the run. A number of samples is held against the run's as steps.
    if file.train_samples is not None:
        file = counted(file)
    fixed = {each.name for each in fields(file) if getattr(getattr(file, each.name), "fixed", False)}
    for say_kept in seams.listed("kept_values"):
        say_kept({name: attrgetter(name)(file) for name in kept}, kept, fixed)

    resume = str(run) if asked.resume == AUTO else asked.resume
    recipe = replace(replace_values(asked, kept), resume=resume)
    # Where the model's own weights are trained, those of the run stay.
    takes_base = "init_from" in given and (asked.resume != AUTO or recipe.freezes_weights)
    return recipe if takes_base else replace(recipe, init_from=None)


def _check_states(run: Path, kind: str, optimizer: OptimizerConfig) -> None:
    """Say how the optimizer begins with the states that one of another `kind` has left in the run. Raises UserError
    where it cannot."""
    takes = optimizer.takes
    check_optimizer(run, kind, optimizer.kind, takes)
    if kind in takes:
        origins = {own: f"as its {theirs}" if theirs else "at zero" for own, theirs in takes[kind].items()}
        told = " and ".join(f"{own} begins {origin}" for own, origin in origins.items()) or "the states are the same"
        say(f"{run} was trained with optimizer.kind={kind} and goes on with {optimizer.kind}: {told}")


def _kept_values(run: Path, saved: dict[str, Any], types: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the values of a run by name, but for options `given` and those of one start. types: of the fields of a
    recipe, whose checks follow; a capability that checks what recipe.json says tells more, and raises UserError."""
    known = {name: as_tuple(saved_value(saved, name)) for name in types if name not in (*given, *OF_ONE_START)}
    kept = {name: value for name, value in known.items() if value is not ABSENT}
    for check in seams.listed("saved_recipes"):
        kept = check(run, saved, types, kept)
    if kept.get("data.tokenizer_file") is not None and "data.tokenizer" in kept:
        kept["data.tokenizer"] = "auto"
        if not Path(kept["data.tokenizer_file"]).exists():  # the run carries it
            kept["data.tokenizer_file"] = str(run / "tokenizer.json")
    return kept


def continue_run(run: Path, values: Mapping[str, Any], step: int) -> None:
    """Say in which `values` of its recipe `run` differs from now on, and rename its checkpoints of later steps than
    this one: they are damaged, or of another history."""
    changes = [line for tell in seams.listed("changed_values") for line in tell(run, values)]
    say("\n  ".join(["resuming, with other options than before:" if changes else "resuming", *changes]))
    for name in quarantine_newer(run / "checkpoints", step):
        say(f"a checkpoint that is newer than step {step} is called {name} from now on", warning=True)
