"""Sentences about words of other programs."""

from pathlib import Path
from typing import Any


class Explanations:
    """Sentences for mistakes of somebody who means another program, or another command. None: nothing to say."""

    def of_recipe(self, architecture: str, name: str, value: str) -> str | None:
        """Return what to use in place of an option that a recipe of the architecture does not have."""

    def of_command(self, command: str, name: str, value: str) -> str | None:
        """Return what to use in place of an option that `dtgpt COMMAND` does not have."""

    def of_recipe_file(self, path: Path) -> str | None:
        """Return what to do where there is no recipe file at `path`."""

    def of_model(self, path: Path, options: Any) -> str | None:
        """Return what to do with `path` where it is not the model that `dtgpt generate` takes. options: its own."""

    def more(self, sentence: str) -> str:
        """Return what to add to an error about options of a recipe."""
        return ""
