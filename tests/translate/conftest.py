"""What tests of `dtgpt translate` share."""

from dataclasses import replace

import pytest

from dtgpt.cli import main
from dtgpt.config.recipe_file import call_recipe, load_module


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs `dtgpt translate WORDS` in an empty folder, and returns exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str):
        (tmp_path / "my_recipe.py").unlink(missing_ok=True)
        with pytest.raises(SystemExit) as left:
            main(["translate", *words])
        captured = capsys.readouterr()
        return left.value.code, captured.out if left.value.code == 0 else captured.err

    return run


def recipe_of(folder):
    return call_recipe(load_module(folder / "my_recipe.py").recipe)


@pytest.fixture
def translated(run, tmp_path):
    """Return a function from a command to its recipe, which is valid, and what was printed."""

    def translated(command: str):
        code, out = run("--", *command.split())
        assert code == 0, out
        recipe = recipe_of(tmp_path)
        replace(recipe, data=replace(recipe.data, path=None), resume=None).validate()
        return recipe, out

    return translated
