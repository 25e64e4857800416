"""`dtgpt recipe`: recipes and job files that come with dtgpt, also where it was installed as a wheel."""

import ast
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Annotated

import dtgpt
from dtgpt.commands.command import Command
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.explanations import Explanations

FOLDER = ("dtgpt", "recipes")  # the last parts of the folder where a wheel puts what comes with dtgpt
KINDS = (".py", ".sbatch", ".yaml")  # recipes, a job of Slurm, those of Kubernetes and SkyPilot


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Print a recipe file that comes with dtgpt, or a job file for a cluster, to be edited and run; without NAME, or
    with --list, list them with what each is.

      model:    dtgpt recipe gpt2_345m > mine.py && torchrun mine.py
      cluster:  dtgpt recipe slurm > slurm.sbatch && sbatch --nodes 2 slurm.sbatch mine.py"""

    input: tuple[str, ...] = ()
    list: Annotated[bool, "list the names, and what each is"] = False


def recipe_files() -> dict[str, Path]:
    """Return the files by name, recipes first, of the checkout that dtgpt runs from, or those that a wheel
    installed."""
    checkout = Path(dtgpt.__file__).parents[1] / "recipes"
    if (checkout / "gpt2_tiny.py").is_file():
        found = list(checkout.iterdir())
    else:
        try:
            installed = metadata.files("dtgpt") or []
        except metadata.PackageNotFoundError:
            installed = []
        found = [Path(str(file.locate())) for file in installed if file.parent.parts[-2:] == FOLDER]
    files = [path for path in found if path.suffix in KINDS]
    return {path.stem: path for path in sorted(files, key=lambda path: (KINDS.index(path.suffix), path.name))}


def recipe_names() -> list[str]:
    """Return the names of the recipes alone."""
    return [name for name, path in recipe_files().items() if path.suffix == ".py"]


class IncludedRecipes(Explanations):
    """Tells who names a recipe that comes with dtgpt, and is not there as a file, how to get it."""

    def of_recipe_file(self, path: Path) -> str | None:
        if path.stem not in recipe_names():
            return None
        return f"there is no recipe file {path}, but dtgpt comes with one: dtgpt recipe {path.stem} > {path.stem}.py"


EXPLANATIONS = IncludedRecipes()


def show_recipe(options: RecipeOptions) -> None:
    """Print the recipe that is named, or a line for each. Raise UserError where there is none of that name."""
    files = recipe_files()
    if options.list and options.input:
        raise UserError(f"--list takes no name, and {shown(options.input[0])} is one; leave out one of them")
    if not options.input:
        width = max(map(len, files), default=0)
        say("\n".join(f"{name:<{width}}  {title_of(path)}" for name, path in files.items()))
        return
    name, *more = options.input
    name = Path(name).stem
    if more:
        raise UserError(f"dtgpt recipe prints one recipe, not {len(options.input)}; give one name")
    if name not in files:
        near = get_close_matches(name, files, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(files)}"
        raise UserError(f"there is no recipe {shown(name)}; {advice}")
    say(files[name].read_text().rstrip("\n"))


def title_of(path: Path) -> str:
    """Return the first line of a recipe's docstring, or of another file's first comment."""
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    comments = (line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("# "))
    return next(comments, "")


command = Command("recipe", RecipeOptions, show_recipe, "gpt2_345m")
