"""`dtgpt compare RUN_A RUN_B`: the curves of two runs, where they part, and what differs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.checkpoint.open import check_recipe, open_config
from dtgpt.commands.command import Command
from dtgpt.commands.model_options import RecipeFile
from dtgpt.config.recipe_file import model_class
from dtgpt.tools.recipe import recipe_names
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp8": 2e-3, "fp16": 1e-3}  # of losses, by the precision of the runs


@dataclass(frozen=True, kw_only=True)
class CompareRunsOptions:
    """Compare the losses of two runs at the steps that both have recorded: whether they are equal bit for bit, within
    rounding, or part, and at which step; and name each field in which recipe, data, code, execution or versions differ.
    A run is a run folder, or a metrics.jsonl. The exit code is 1 if the runs part. No weights are read: a --recipe is
    checked against the class of the runs' models, and not needed.

    The plans of one recipe are compared by dtgpt compare RECIPE.py, see dtgpt compare --help."""

    output: Annotated[str | None, "PNG file of the curves and of how far they are apart; none: no picture"] = None
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
    from dtgpt.charts.plot import check_picture, import_pyplot
    from dtgpt.compare.plot import plot_two_runs
    from dtgpt.compare.two_runs import compare_runs
    from dtgpt.compare.two_runs_report import report

    if options.output is not None:
        check_picture(Path(options.output))
        import_pyplot()
    two = compare_runs(*runs, options.tolerance, TOLERANCE)
    if options.output is not None:
        plot_two_runs(two, Path(options.output))
    say(report(two))
    return 0 if two.parting is None else 1


def of_recipes(name: str, value: str) -> str | None:
    """Return why two runs do not have an option that a recipe has, None for an option that neither has."""
    if name not in ("plans", "steps", "random", "case", "minutes", "against", "commits", "json"):
        return None
    return f"--{name} belongs to dtgpt compare RECIPE.py; two runs are compared with --output and --tolerance alone"


EXAMPLE = "runs/gpt2_tiny-001 runs/gpt2_tiny-002"
command = Command("compare RUN ...", CompareRunsOptions, compare_two_runs, EXAMPLE, explain=of_recipes)


def means_runs(words: list[str]) -> bool:
    """Return whether the words after `dtgpt compare` name runs, and not a recipe."""
    if words and not words[0].startswith("-"):
        path = Path(words[0])
        return path.is_dir() or not (path.suffix == ".py" or (words[0] in recipe_names() and not path.exists()))
    return any(word.endswith(".jsonl") or Path(word).is_dir() for word in words if not word.startswith("-"))
