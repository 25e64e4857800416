"""The command lines of dtgpt: words become paths and values of options, `--help` tells the options, and a mistake is
one sentence.

A command is a dataclass of options and a function that does the work. What an option is called, takes and means stands
once, in the annotation of its field: the reader of words (`dtgpt.config.overrides`), the checks of values
(`dtgpt.util.field_types`) and the help here all read it. `dtgpt train` and other commands on recipes have the fields of
a recipe as options, too, and use the functions below by themselves.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import getdoc
from itertools import takewhile
from pathlib import Path
from typing import Any

from dtgpt.config.overrides import read_words, take
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import check_fields
from dtgpt.util.storage import located

ALL = "--help-all"
HELP = ("-h", "--help", ALL)


@dataclass(frozen=True)
class Command:
    """A command of `dtgpt`; call it with the words after its name to run it and get the exit code.

    usage: its name, then its paths in capitals, as in "convert MODEL TARGET" and "plot RUN ...".
    options: a dataclass with `Annotated` fields, whose docstring `--help` prints unless there is a `doc`. If it has a
    field `input`, words that belong to no option are added to it, and there are no other paths.
    work: called with each path, and `options=`; returns the exit code, None for 0.
    example: words of a correct call, for error messages.
    aliases: other names of fields. explain: returns a sentence about an option that does not exist here, by its name
    and value; what it says nothing of, capabilities may know from other programs.
    """

    usage: str
    options: type
    work: Callable[..., int | None]
    example: str
    doc: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[[str, str], str | None] = lambda name, value: None

    @property
    def name(self) -> str:
        return " ".join(takewhile(str.islower, self.usage.split()))

    def __call__(self, words: list[str]) -> int:
        """Run the command. Raises UserError."""
        if wants_help(words):
            say(with_dashes(help_text(self.help_doc(), usage_of(self.usage), self.options)))
            return 0
        paths, options = self.read(words)
        return self.work(*paths, options=options) or 0

    def help_doc(self) -> str:
        return self.doc or getdoc(self.options) or ""

    def _explain(self, name: str, value: str) -> str | None:
        own = self.explain(name, value)
        return own or seams.ask("explanations", lambda each: each.of_command(self.name, name, value))

    def read(self, words: list[str]) -> tuple[list[Path], Any]:
        """Return paths and options. Raises UserError for a value out of bounds, and for missing or extra paths."""
        needed = self.usage.removeprefix(self.name).strip()
        missing = UserError(f"dtgpt {self.name} needs {needed}, such as dtgpt {self.name} {self.example}")
        if needed and not words:
            raise missing
        try:
            free, given = read_words(words, self.options, free=True, aliases=self.aliases, explain=self._explain)
            options = take(self.options(), given)
            check_fields(options, "--")
        except UserError as error:
            raise UserError(with_dashes(str(error))) from None
        if hasattr(options, "input"):
            return [], replace(options, input=(*free, *options.input))
        count = sum(word.isupper() for word in needed.split())
        if len(free) < count:
            raise missing
        if len(free) > count and not needed.endswith("..."):
            raise UserError(f"{shown(free[count])} is not an option, and dtgpt {self.name} takes {needed} only")
        return [located(word) for word in free], options


def with_dashes(text: str) -> str:
    """Return `text` with the options in it as they are usually typed, `--json-keys`."""
    return re.sub(r"(?<!\S)--[a-z_]+", lambda name: name[0].replace("_", "-"), text)


def wants_help(words: list[str]) -> bool:
    """Return whether help is asked for anywhere on a command line."""
    return any(word in HELP for word in words)


def usage_of(words: str) -> str:
    """Return `dtgpt WORDS` as it is typed, where this process was started by the command, by `python -m` or by
    torchrun."""
    is_module = Path(sys.argv[0]).parts[-2:] == ("dtgpt", "__main__.py")
    return f"{_starter()} -m dtgpt {words}" if is_module else f"dtgpt {words}"


def usage_of_file(name: str) -> str:
    """Return how the recipe of this name is started, where this process runs a recipe file as a script."""
    file = sys.argv[0] if sys.argv[0].endswith(".py") else f"recipes/{name}.py"
    return f"{_starter()} {file}"


def _starter() -> str:
    return "torchrun --nproc-per-node N" if "TORCHELASTIC_RUN_ID" in os.environ else "python"


def help_text(doc: str, program: str, *configs: Any, **choices: Any) -> str:
    """Return the usage of a program, and what a capability says of its options: `commands.option_help.text.describe`,
    whose arguments these are."""
    describe = next(iter(seams.listed("option_help")), None)
    return f"usage: {program} [--option value ...]" if describe is None else describe(doc, program, *configs, **choices)
