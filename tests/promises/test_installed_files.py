"""What an installation that is not editable has: every folder of modules, every other file of the package, recipes."""

import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def found(folder: Path, patterns: list[str]) -> set[Path]:
    return set(chain.from_iterable(map(folder.glob, patterns)))


def files_of(folder: str) -> set[Path]:
    return {path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_files_beside_modules_are_installed():
    beside = {path for path in files_of("dtgpt") if path.suffix != ".py"}
    assert beside == found(ROOT / "dtgpt", SETUP["package-data"]["dtgpt"])


def test_every_folder_of_modules_is_a_package():
    assert all((path.parent / "__init__.py").exists() for path in files_of("dtgpt") if path.suffix == ".py")


def test_recipes_are_installed():
    assert files_of("recipes") == found(ROOT, SETUP["data-files"]["share/dtgpt/recipes"])
