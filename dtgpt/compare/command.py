"""`dtgpt compare`: the same steps under several plans and on one process; or the curves of two runs."""

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.checkpoint.open import check_recipe
from dtgpt.commands.command import Command
from dtgpt.commands.model_options import RecipeFile
from dtgpt.config.overrides import Options, take
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import model_class
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.tools.recipe import recipe_names
from dtgpt.tools.recipes import RecipeCommand
from dtgpt.tools.results import check_output, write_results
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.start import checked, load_recipe, settle
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Given, Is, Rule, Rules, check_rules
from dtgpt.util.shared.option_words import as_words


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Run the same steps under each plan and on one process, and compare losses, gradients and weights. The first
    tensor that differs is named. The exit code is 1 if a plan differs by more than rounding explains, or more than the
    tolerance. --against and --commits compare other settings and other code in the same way.

    Options of the recipe can be added. With --random, random small models run under random plans instead, each against
    one process; --seed then chooses them, and other options hold in all of them. A case that fails is shrunk, and the
    command that repeats it is printed.

    With two runs, dtgpt compare RUN_A RUN_B shows where their curves diverge and what differs; dtgpt compare RUN_A
    --help lists its options.
    """

    plans: Annotated[tuple[str, ...], "plans to compare with one process"] = ()
    steps: Annotated[int, "number of optimizer steps under each plan", Bounds(1)] = 5
    tolerance: Annotated[float | None, "largest accepted relative difference; none: by precision", Bounds(0)] = None
    random: Annotated[int | None, "number of random models and plans to run in place of the recipe's", Bounds(1)] = None
    case: Annotated[str | None, "first random case, by its number, or the text of a case to repeat"] = None
    against: Annotated[
        tuple[str, ...], 'settings to compare with the recipe\'s, as in --against "--precision bf16"'
    ] = ()
    commits: Annotated[
        tuple[str, ...], "git commits of the reference and of all other runs; one: the others run this code"
    ] = ()
    json: Annotated[str | None, "file for the result as JSON"] = None
    minutes: Annotated[float | None, "minutes after which no other random case begins", Bounds(above=0)] = None


OF_ONE_RECIPE: Rules = (
    Rule("--minutes {minutes:g} limits random cases; add --random 100, or leave it out", Given("minutes")),
    Rule(
        "dtgpt compare needs plans, such as --plans tp2 pp2 tp2_pp2, or settings, such as --against "
        '"--precision bf16", or commits, such as --commits HEAD~1',
        Is("plans", "==", ()),
        Is("against", "==", ()),
        Is("commits", "==", ()),
    ),
    Rule("--commits takes one or two commits, and {number} were given; use HEAD~1 HEAD", Is("number", ">", 2)),
)


def compare_plans(recipe: Recipe, own: CompareOptions, given: Options, path: Path) -> int:
    extra = {"against": own.against, "commits": own.commits, "json": own.json}
    if own.random is not None or own.case is not None:
        from dtgpt.compare.fuzz.case import Setting, plain, write_text
        from dtgpt.compare.fuzz.run import run_random

        for name in (name for name, value in extra.items() if value):
            raise UserError(f"--{name} is for the steps of one recipe; leave out --random and --case, or --{name}")
        for name in own.plans:
            parse_plan(name)
        with tempfile.TemporaryDirectory(prefix="dtgpt-compare-") as folder:
            base = plain(take(recipe, dict(given)))
            setting = Setting(base, given, write_text(Path(folder) / "documents.jsonl"))
            return run_random(setting, path, own.random or 1, own.case, own.plans, own.minutes, own.tolerance)
    check_rules(OF_ONE_RECIPE, own, number=len(own.commits))
    output = None if own.json is None else Path(own.json)
    if output is not None:
        check_output(output, "--json", "compare.json")
    words = as_words(given)
    against = {text: in_place_of(given, settings_of(text)) for text in own.against}
    recipe = settle(recipe, given)
    for text, more in against.items():
        other = checked(load_recipe(path, more))
        ranks = [each.section(LoraConfig).rank for each in (other, recipe)]
        check_same_shapes(text, (other.model, ranks[0]), (recipe.model, ranks[1]))
    from dtgpt.compare.compare import compare

    result = compare(recipe, path.absolute(), list(own.plans), own.steps, own.tolerance, words, against, own.commits)
    if output is not None:
        write_results(output, "--json", result)
    return result["status"]


def settings_of(text: str) -> list[str]:
    """Return the words of one value of --against. Raises UserError for options that it cannot have."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"--against {text!r} has a quote that is not closed; close it") from None
    for name in names_in(words):
        if name in REFUSED:
            raise UserError(f"--against {text!r} has --{name}; {REFUSED[name]}")
    return words


def names_in(words: list[str]) -> list[str]:
    return [word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")]


def in_place_of(given: Options, words: list[str]) -> list[str]:
    """Return the words of all options that are given to every run, without those that these words give otherwise, and
    these words."""
    others = {name.replace("-", "_") for name in names_in(words)}
    return [*as_words({name: values for name, values in given.items() if name not in others}), *words]


def check_same_shapes(text: str, theirs: tuple[ModelConfig, int], ours: tuple[ModelConfig, int]) -> None:
    """Raise UserError where a value of --against gives the model, or its adapters of a rank, other parameters."""
    shapes = [({own.name: own.shape for own in inventory(model).parameters()}, rank) for model, rank in (theirs, ours)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"--against {text!r} changes the shapes of weights, which cannot be compared then; give it to all runs, "
            "outside of --against"
        )


def record(words: list[str]) -> int:
    """Run `dtgpt record RECIPE.py FILE STEPS MOVED SHARED ROLE [--option value ...]`, which `dtgpt compare --commits`
    starts in each process. MOVED, SHARED: as in `Tracing`; ROLE: "reference", or "plan"."""
    from dtgpt.compare.record import record_run

    if len(words) < 6:
        raise UserError("dtgpt record is internal to dtgpt compare; use dtgpt compare")
    record_run(words)
    return 0


REFUSED = {"plan": "use --plans", "resume": "it begins with initial weights; leave --resume out"}
EXAMPLE = "recipes/gpt2_tiny.py --plans tp2 pp2"
of_plans = RecipeCommand("compare RECIPE.py", CompareOptions, compare_plans, EXAMPLE, refused=REFUSED)


# Two runs.


@dataclass(frozen=True, kw_only=True)
class CompareRunsOptions:
    """Compare the losses of two runs at the steps that both have recorded: whether they are equal bit for bit, within
    rounding, or part, and at which step; and name each field in which recipe, data, code or execution differ.
    A run is a run folder, or a metrics.jsonl. The exit code is 1 if the runs part. No weights are read: a --recipe is
    checked against the class of the runs' models, and not needed.

    The plans of one recipe are compared by dtgpt compare RECIPE.py, see dtgpt compare --help."""

    tolerance: Annotated[float | None, "largest accepted relative difference; none: by precision", Bounds(0)] = None
    recipe: RecipeFile = None


def compare_two_runs(*runs: Path, options: CompareRunsOptions) -> int:
    """Print the comparison and return the exit code: 1 where the runs part, else 0. Raises UserError."""
    if len(runs) != 2:
        given = "one was" if len(runs) == 1 else f"{len(runs)} were"
        first, second = (*runs, Path("runs/gpt2_tiny-002"))[:2]
        raise UserError(
            f"dtgpt compare takes two runs, and {given} given; use dtgpt compare {first} {second}, or dtgpt compare "
            "RECIPE.py --plans NAME"
        )
    own = model_class(options.recipe)
    for run in runs if own else ():
        if list_checkpoints(run / "checkpoints"):
            check_recipe(run, open_config(run, own), own)
    from dtgpt.compare.two_runs import compare_runs
    from dtgpt.compare.two_runs_report import report

    two = compare_runs(*runs, options.tolerance, TOLERANCE)
    say(report(two))
    return 0 if two.parting is None else 1


def explain_of_recipes(name: str, value: str) -> str | None:
    """Return why two runs do not have an option, None for one of which nothing is known."""
    if name == "output":
        return "--output is an option of dtgpt plot, which draws both runs; dtgpt compare prints what differs"
    if name not in ("plans", "steps", "random", "case", "minutes", "against", "commits", "json"):
        return None
    return f"--{name} belongs to dtgpt compare RECIPE.py; two runs are compared with --tolerance alone"


TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp8": 2e-3, "fp16": 1e-3}  # of losses, by the precision of the runs
EXAMPLE_OF_RUNS = "runs/gpt2_tiny-001 runs/gpt2_tiny-002"
of_runs = Command("compare RUN ...", CompareRunsOptions, compare_two_runs, EXAMPLE_OF_RUNS, explain=explain_of_recipes)


def means_runs(words: list[str]) -> bool:
    """Return whether the words after `dtgpt compare` name runs, and not a recipe."""
    if words and not words[0].startswith("-"):
        path = Path(words[0])
        return path.is_dir() or not (path.suffix == ".py" or (words[0] in recipe_names() and not path.exists()))
    return any(word.endswith(".jsonl") or Path(word).is_dir() for word in words if not word.startswith("-"))


def command(words: list[str]) -> int:
    """Compare the plans of a recipe, or two runs, and return the exit code. Raises UserError."""
    if not words:
        raise UserError(f"dtgpt compare needs a recipe, such as {EXAMPLE}, or two runs, such as {EXAMPLE_OF_RUNS}")
    return of_runs(words) if means_runs(words) else of_plans(words)
