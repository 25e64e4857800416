"""Recipe files: Python, with a function `recipe()`.

A recipe is code, so that it may compute its sizes, and bring a model, a loss or a task of its own. It is executed where
a user names the file, and nowhere else: what a checkpoint or a run folder says is data. Whatever such a file does wrong
is told with its line, as a mistake of the user's and not of dtgpt.

The optimizer that `optimizer.kind` names, AdamW or that of a capability, is imported when a recipe has it.
"""

import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.machinery import SourceFileLoader
from os import PathLike
from pathlib import Path
from types import ModuleType

from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig, is_users
from dtgpt.util import seams
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.field_types import check_annotations
from dtgpt.util.storage import did_you_mean


def call_recipe(recipe_function: Callable) -> Recipe:
    """Return the recipe that a recipe file's function returns. Raises UserError if it fails or returns another type."""
    code = getattr(recipe_function, "__code__", None)
    path = Path(code.co_filename if code else "recipe")
    with _errors_of(path):
        recipe = recipe_function()
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe() returns {type(recipe).__name__}; return a dtgpt.config.recipe.Recipe")
    check_annotations(recipe)  # its rules may be kept by the options of a command line
    if code and is_users(type(recipe.model)):
        type(recipe.model).recipe_file = str(path.resolve())  # checkpoints name it
    return recipe


def model_class(recipe: Recipe | str | PathLike | None) -> type[ModelConfig] | None:
    """Return the class of a recipe's model, or of that of a recipe file; None without one. Raises UserError."""
    if recipe is None:
        return None
    if not isinstance(recipe, Recipe):
        recipe = call_recipe(load_module(Path(recipe)).recipe)
    return type(recipe.model)


def recipe_module(words: list[str], command: str) -> ModuleType:
    """Return the module of the recipe file that a command's first word names. Raises UserError if there is none."""
    if not words or words[0].startswith("-"):
        raise UserError(f"dtgpt {command} needs a recipe file, such as dtgpt {command} recipes/gpt2_tiny.py")
    path = Path(words[0])
    if not path.is_file() and (sentence := seams.ask("explanations", lambda each: each.of_recipe_file(path))):
        raise UserError(sentence)
    return load_module(path)


def load_module(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        advice = did_you_mean(path, "give one such as recipes/gpt2_tiny.py")
        raise UserError(f"there is no recipe file {path}; {advice}")
    # A name that no import has, as `__main__` of a program is one; pickle takes what is before a dot for a package.
    name = f"recipe {path.resolve()}".replace(".", "%2E")
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__, module.__package__ = str(path), ""  # of no package, as a program
    sys.modules[name] = module  # which dataclasses and type hints look up
    for enter in seams.listed("recipe_folders"):
        enter(path.resolve().parent)
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
        raise UserError(f"{error.filename or path}{where}: {_short(error.msg)}; correct the recipe") from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f" line {frame.lineno}" for frame in reversed(frames) if Path(frame.filename) == path), "")
        raise UserError(f"{path}{line}: {type(error).__name__}: {_short(error)}; correct the recipe") from None


def _short(message: object) -> str:
    """Return an error's message in one line."""
    return textwrap.shorten(str(message), 300, placeholder=" ...")


def kinds() -> dict[str, str]:
    """Return 'module:class' of the config of every optimizer, by kind."""
    return {OptimizerConfig.kind: "dtgpt.config.sections:OptimizerConfig", **seams.added("optimizers")}


def named_kind(words: Sequence[str]) -> str | None:
    """Return the value of the last `--optimizer.kind` among the words of a command line; None without one."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == "--optimizer.kind":
            found = value if equals else following
    return found


def of_kind(recipe: Recipe, kind: str | None) -> Recipe:
    """Return the recipe with the optimizer of this kind, and the values of all fields that both kinds have. Raise
    UserError where there is none."""
    if kind is None or kind == recipe.optimizer.kind:
        return recipe
    if kind not in (known_kinds := kinds()):
        raise UserError(f"optimizer.kind={shown_name(kind)} is not an optimizer; use {', '.join(known_kinds)}")
    config = seams.load(known_kinds[kind])
    known = {f.name for f in fields(config)} - {"kind"}
    values = {f.name: getattr(recipe.optimizer, f.name) for f in fields(recipe.optimizer) if f.name in known}
    return replace(recipe, optimizer=config(**values))
