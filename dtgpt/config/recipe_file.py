"""Recipe files: Python, with a function `recipe()`."""

import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from dtgpt.config.recipe import Recipe
from dtgpt.util.errors import UserError, did_you_mean
from dtgpt.util.field_types import check_fields


def call_recipe(recipe_function: Callable) -> Recipe:
    """Return the recipe that a recipe file's function returns. Raises UserError if it fails or returns another type."""
    code = getattr(recipe_function, "__code__", None)
    with _errors_of(Path(code.co_filename if code else "recipe")):
        recipe = recipe_function()
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe() returns {type(recipe).__name__}; return a dtgpt.config.recipe.Recipe")
    check_fields(recipe)
    return recipe


def recipe_module(words: list[str], command: str, shipped: Iterable[str] = ()) -> ModuleType:
    """Return the module of the recipe file that a command's first word names. shipped: names of recipes that
    `dtgpt recipe` prints. Raises UserError if there is none."""
    if not words or words[0].startswith("-"):
        raise UserError(f"dtgpt {command} needs a recipe file, such as dtgpt {command} recipes/gpt2_tiny.py")
    path = Path(words[0])
    if not path.is_file() and path.stem in shipped:
        raise UserError(
            f"there is no recipe file {path}, but dtgpt comes with one: dtgpt recipe {path.stem} > {path.stem}.py"
        )
    return load_module(path)


def load_module(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        advice = did_you_mean(path, "give one such as recipes/gpt2_tiny.py")
        raise UserError(f"there is no recipe file {path}; {advice}")
    loader = SourceFileLoader(path.stem, str(path))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    with _errors_of(path):
        loader.exec_module(module)
    if not callable(getattr(module, "recipe", None)):
        raise UserError(f"{path} is not a recipe: it defines no function recipe()")
    return module


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn what a recipe file raises into a UserError that names its line."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        where = f" line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{where}: {_short(error.msg)}; correct the recipe") from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f" line {frame.lineno}" for frame in reversed(frames) if Path(frame.filename) == path), "")
        raise UserError(f"{path}{line}: {type(error).__name__}: {_short(error)}; correct the recipe") from None


def _short(message: object) -> str:
    """Return an error's message in one line."""
    return textwrap.shorten(str(message), 300, placeholder=" ...")
