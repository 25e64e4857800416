"""Commands that take a recipe file, with its options besides their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtgpt.commands.command import Command, help_text, usage_of, wants_help
from dtgpt.config.overrides import explain_for, read_words, take
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, named_kind, of_kind, recipe_module
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import check_fields


@dataclass(frozen=True)
class RecipeCommand(Command):
    """A command whose first word is a recipe file. `work` is called with the recipe, the command's own options, the
    recipe's options by name, and the path of the recipe file.

    refused: options of recipes that the command does not take, with what to do instead.
    """

    refused: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, words: list[str]) -> int:
        if wants_help(words):
            files = [word for word in words if word.endswith(".py")]
            recipe = _recipe_of(files, words, self.name) if files else Recipe
            usage = usage_of(self.usage)
            say(help_text(self.help_doc(), usage, self.options, recipe, without=self.refused, words=words))
            return 0
        recipe = _recipe_of(words, words, self.name)
        _, given = read_words(words[1:], self.options, recipe, explain=explain_for(recipe.model.architecture))
        for name in self.refused.keys() & given:
            raise UserError(f"dtgpt {self.name} does not take --{name}; {self.refused[name]}")
        own = take(self.options(), given)
        check_fields(own, "--")
        return self.work(recipe, own, given, Path(words[0])) or 0


def _recipe_of(files: list[str], words: list[str], command: str) -> Recipe:
    """Return the recipe of the first of `files`, with the kind of optimizer that `words` name."""
    return of_kind(call_recipe(recipe_module(files, command).recipe), named_kind(words))
