"""Runs that tests begin with: trained once in a process of pytest, then copied for each test. Used by tests only."""

import shutil
import tempfile
from pathlib import Path

from dtgpt.config.recipe import Recipe
from dtgpt.run.folder import create_run
from dtgpt.train.loop import train
from tests.support.runs import change

_folder = tempfile.TemporaryDirectory(prefix="dtgpt-trained-", ignore_cleanup_errors=True)
_made: dict[str, Path] = {}


def trained(recipe: Recipe, **changes) -> Path:
    """Return a new run of the recipe, as `train` by one process leaves it. Of recipes that differ in their folder alone
    one is trained: what they read must be the same."""
    recipe = change(recipe, **changes)
    key = repr(recipe)
    for path in filter(None, (recipe.runs, recipe.data.path)):
        key = key.replace(str(Path(path).parent), "")
    if key not in _made:
        assert train(recipe) == 0
        run = max(Path(recipe.runs).glob(f"{recipe.name}-*"))
        _made[key] = Path(shutil.copytree(run, Path(_folder.name) / f"{len(_made)}" / run.name))
        return run
    return Path(shutil.copytree(_made[key], create_run(Path(recipe.runs), recipe.name), dirs_exist_ok=True))
