"""What becomes of an option of another program. Each has one answer in a table of its program, from which messages, the
docs and translations derive."""

import math
import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from dtgpt.util.errors import UserError, shown

Kind = Literal["translated", "not needed", "cannot be done"]
SETTING = re.compile(r"--([a-z_.0-9]+) (\{[A-Z]+\}|[^\s,;]+)")
# Placeholders of values that are not numbers.
TEXTS = ("DIR", "FILE", "NAME", "PATHS", "WEIGHTS", "STYLE", "KIND", "NAMES")
SWITCHES = {"on": True, "off": False, "none": None}


@dataclass(frozen=True)
class Answer:
    """kind: what becomes of the option. text: what a user reads; `{N}` in it is the option's value.

    together: the values of a recipe follow from several options, in the program's own module; else the options of
    dtgpt with which the text begins are those values. of_model: what cannot be done is another model, so that no recipe
    computes what the command does.
    """

    kind: Kind
    text: str
    together: bool = False
    of_model: bool = False

    def filled(self, word: str = "", value: str = "") -> str:
        """Return the text with `value` in place of the placeholder `word`, which stays where there is no value."""
        return re.sub(r"\{[A-Z]+\}", lambda _: shlex.quote(value) if value else word, self.text)

    def sentence(self, word: str = "", value: str = "") -> str:
        """Return the text, filled, as the end of a sentence that says what to do."""
        return f"{self.filled(word, value)}{'; leave it out' * (self.kind == 'not needed')}"

    def settings(self, option: "GivenOption") -> dict[str, Any]:
        """Return the values, by the names of dtgpt's options, with which the text begins. Raises UserError for a value
        that must be a number and is none."""
        found: dict[str, Any] = {}
        at = 0
        while match := SETTING.match(self.text, at):
            name, text = match.groups()
            if not text.startswith("{"):
                found[name] = SWITCHES[text] if text in SWITCHES else _number(text)
            else:
                found[name] = option.value if text[1:-1] in TEXTS else number(option)
            at = match.end() + 1
        return found


def to(text: str) -> Answer:
    """The text begins with the options of dtgpt that say the same."""
    return Answer("translated", text)


def together(text: str) -> Answer:
    """Has an equivalent, which depends on other options, too."""
    return Answer("translated", text, together=True)


def skip(text: str) -> Answer:
    """Is not needed: dtgpt does it always, or what it is about does not exist."""
    return Answer("not needed", text)


def no(text: str) -> Answer:
    """Asks for something that dtgpt does not do."""
    return Answer("cannot be done", text)


def other(text: str) -> Answer:
    """Asks for a model that dtgpt does not have."""
    return Answer("cannot be done", text, of_model=True)


Table = Mapping[str, Answer]  # a key holds names, each with a placeholder or a value: "lr X", "lr-decay-style wsd"


def number(option: "GivenOption") -> Any:
    """Return the value of an option as int or float. Raises UserError where it is no number."""
    value = _number(option.value)
    if isinstance(value, str):
        raise UserError(f"{option.source}: {shown(value)} is not a number; correct the command")
    return value


def count(option: "GivenOption") -> int:
    """Return the value of an option as a whole number above 0. Raises UserError where it is none."""
    value = number(option)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{option.source}: {shown(option.value)} is not a whole number above 0; correct the command")
    return value


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            if math.isfinite(value := kind(text)):
                return value
        except (ValueError, OverflowError):
            continue
    return text


def flat(sections: Mapping[str, Mapping[str, Answer]]) -> dict[str, Answer]:
    """Return the entries of all sections of a table, one for each option."""
    return {
        key: answer for section in sections.values() for keys, answer in section.items() for key in keys.split(", ")
    }


def find(table: Table, name: str, value: str) -> tuple[str, Answer] | None:
    """Return the placeholder, or the value, of the first entry for an option, and its answer; None without one. A name
    with `*` stands for all that it matches, a word in small letters for this value alone."""
    for key, answer in table.items():
        known, _, wanted = key.partition(" ")
        if fnmatchcase(name, known) and (not wanted or wanted.isupper() or wanted.lower() == value.lower()):
            return wanted, answer
    return find(table, f"no-{name[8:]}", value) if name.startswith("disable-") else None  # the same in Megatron-LM


def explain(typed: str, value: str, table: Table, program: str = "Megatron-LM") -> str | None:
    """Return a sentence about an option of another program, typed with '-' or '_', with this value; None if the table
    does not have it."""
    if (found := find(table, typed.replace("_", "-").lower(), value)) is None:
        return None
    wanted, answer = found
    named = f"--{typed} {value}" if wanted and not wanted.isupper() else f"--{typed}"
    sentence = answer.sentence(wanted, value)
    return f"{named} of {program} does not exist here: {'use ' * sentence.startswith('--')}{sentence}"


@dataclass(frozen=True)
class GivenOption:
    """An option of a command: its name without dashes, its words, and how it stands there."""

    name: str
    value: str
    source: str


def read_options(words: Sequence[str]) -> tuple[list[str], dict[str, GivenOption]]:
    """Return the words before the first option, and the options `--name value ...` or `--name=value` by their names, in
    small letters with '-'. The last one of a name counts."""
    free: list[str] = []
    found: dict[str, GivenOption] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            free.append(word)
            continue
        typed, equals, text = word.partition("=")
        values = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.popleft())
        name = typed[2:].replace("_", "-").lower()
        found.pop(name, None)
        found[name] = GivenOption(name, " ".join(values), " ".join([typed, *values]))
    return free, found
