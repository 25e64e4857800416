"""Command-line options as values of a config's fields: `--optimizer.lr 3e-4` or `--optimizer.lr=3e-4`.

A parser such as argparse would want each option written down a second time, and would say other sentences than those
about a value in a recipe file.

A config is a dataclass, and its options have the names of its fields, with dots for those of sections; nothing else
says which options there are. First words are read (`read_words`), and all that is wrong with them is told at once. Then
configs take the values that are theirs (`take`), so that one command line may be for several. Bounds are checked by
`dtgpt.util.field_types`, when values are where they belong.
"""

import difflib
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin

from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import KINDS, annotations

LARGEST = 1 << 53  # far beyond any sensible size, and far from where products of sizes overflow
SWITCH = {"on": True, "true": True, "off": False, "false": False}
NEITHER = ("yes", "no", "1", "0", "y", "n")  # what other programs take for on and off
EXAMPLES = {int: "100", float: "0.1"}
REQUIRED = object()  # stands for the value of a field without a default
Options = dict[str, list[str]]  # the words of each option that was given; ["on"] for a bare flag


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (dotted name, type, description, value) of every field that is not itself a config. For a class of configs
    the values are its defaults, or REQUIRED."""
    for field, type_, extras in annotations(config if isinstance(config, type) else type(config)):
        name = prefix + field
        value = getattr(config, field, type_ if is_dataclass(type_) else REQUIRED)
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
        elif extras:
            yield name, type_, extras[0], value


def apply_overrides(config: Any, arguments: list[str]) -> Any:
    """Return `config` with the fields named in `arguments` replaced. Raises UserError for words that are no option, and
    for values that are not of its type."""
    return take(config, read_words(arguments, config)[1])


def read_words(
    words: list[str],
    *configs: Any,
    free: bool = False,
    aliases: Mapping[str, str] | None = None,
    explain: Callable[[str, str], str | None] = lambda name, value: None,
) -> tuple[list[str], Options]:
    """Return the words that belong to no option, and the options by the names of the configs' fields.

    '-' and '_' in names are the same. A tuple takes several words; a bool may be given without a value, which means on.
    The last value of a repeated option is used, with a warning.

    free: whether words may belong to no option. aliases: other names of fields, beside those in `aliases` of the
    configs. explain: returns a sentence about an
    option, or a choice, that does not exist here, by its name and value; None if it has none.
    Raises UserError for unknown names (with the nearest ones), unknown choices and missing values, all at once.
    """
    known = {name: type_ for config in reversed(configs) for name, type_, *_ in leaves(config)}
    meant = reduce(or_, (dict(getattr(config, "aliases", {})) for config in configs), {}) | dict(aliases or {})
    alone: list[str] = []
    options: Options = {}
    problems: list[str] = []
    # What is wrong is gathered, and not raised at once: a user mends a whole command line in one go.
    for option, following in _apart(words):
        typed, equals, text = option.removeprefix("--").partition("=")
        name = typed.replace("-", "_")
        name = meant.get(name, name)
        kind = known.get(name)
        count = len(following) if kind is None else _number_of_values(kind, following, free)
        values, others = ([text], following) if equals else (following[:count], following[count:])
        if not typed:  # what no option stands before
            values, others = [], [*filter(None, [option]), *following]
        elif kind is None:
            problems.append(
                explain(typed, " ".join(values)) or f"there is no option --{typed}; {_nearest(name, known)}"
            )
        elif not values and kind is bool:
            options[name] = ["on"]
        elif not values:
            wanted = "at least one word after it" if get_origin(kind) is tuple else "a value"
            problems.append(f"--{typed} needs {wanted}: --{typed} {describe_type(kind)}")
        elif get_origin(kind) is Literal and values[0] not in get_args(kind):
            choices = ", ".join(get_args(kind))
            problems.append(
                explain(typed, values[0]) or f"--{typed} {shown_name(values[0])} is not a choice; use one of {choices}"
            )
        elif get_origin(kind) is tuple:
            options[name] = [*options.get(name, []), *values]
        else:
            if name in options:
                before = shown(options[name][0])
                say(f"--{typed} is given twice; {shown(values[0])} replaces {before}", warning=True)
            options[name] = values
        if free:
            alone += others
        elif others:
            problems.append(_stray(others, options.get(name), name))
    if problems:
        heading = [f"{len(problems)} options cannot be used:"] if len(problems) > 1 else []
        raise UserError("\n  ".join([*heading, *problems]))
    return alone, options


def explain_for(architecture: str) -> Callable[[str, str], str | None]:
    """Return `explain` of `read_words` for options of recipes of an architecture, by what capabilities know of other
    programs."""
    return lambda name, value: seams.ask("explanations", lambda each: each.of_recipe(architecture, name, value))


def take(config: Any, options: Options) -> Any:
    """Return `config` with its fields among `options` replaced, and remove these from `options`."""
    for name, type_, *_ in list(leaves(config)):
        if name in options:
            config = _replace(config, name, _parse(name, options.pop(name), type_))
    return config


def replace_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return `config` with the fields named in `values` replaced."""
    for name, value in values.items():
        config = _replace(config, name, value)
    return config


def describe_type(type_: Any) -> str:
    """Return the placeholder for a value of this type in `--help`: INT, TEXT ..., on|off."""
    if get_origin(type_) in (Union, types.UnionType):
        return "|".join(describe_type(t) if t is not type(None) else "none" for t in get_args(type_))
    if get_origin(type_) is Literal:
        return "|".join(get_args(type_))
    if get_origin(type_) is tuple:
        return f"{describe_type(get_args(type_)[0])} ..."
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "on|off"}[type_]


def _apart(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option, as it is typed, with the words up to the next one; at first those before any, with ""."""
    option, following = "", list[str]()
    for word in words:
        if _is_option(word):
            yield option, following
            option, following = word, []
        else:
            following.append(word)
    yield option, following


def _number_of_values(kind: Any, following: list[str], free: bool) -> int:
    """Return how many of the words behind an option are its values."""
    if get_origin(kind) is tuple:
        return len(following)
    if kind is bool and free:  # where a word may belong to no option, only one of a switch does
        return int(following[:1] != [] and following[0].lower() in (*SWITCH, *NEITHER))
    return min(len(following), 1)


def _is_option(word: str) -> bool:
    """Return whether a word begins an option. Several words in quotes, "--precision bf16", are a value."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def _stray(words: list[str], values: list[str] | None, option: str) -> str:
    """Return what is wrong with words that belong to no option. values: those of the option before them."""
    if values is None:
        return f"{shown(words[0])} is not an option; options look like --steps 100 (see --help)"
    whole = " ".join([*values, *words])
    return (
        f"--{option} takes one value, but {shown(words[0])} follows it; put several words in quotes: --{option} "
        f"{whole!r}"
    )


def _nearest(name: str, known: Collection[str]) -> str:
    last_parts = {full.rpartition(".")[2]: full for full in reversed(list(known))}
    near = difflib.get_close_matches(name.rpartition(".")[2], last_parts, n=1, cutoff=0.75)
    return f"did you mean --{last_parts[near[0]]}?" if near else "see --help for the list"


def _parse(name: str, words: list[str], type_: Any) -> Any:
    if get_origin(type_) is tuple:
        return tuple(_parse(name, [word], get_args(type_)[0]) for word in words)
    (text,) = words
    if get_origin(type_) in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        (type_,) = (t for t in get_args(type_) if t is not type(None))
    if type_ is str or get_origin(type_) is Literal:  # whose choices `read_words` has checked
        return text
    if type_ is bool:
        if text.lower() not in SWITCH:
            raise UserError(f"--{name} {shown_name(text)} is not a choice; use on or off, or --{name} alone for on")
        return SWITCH[text.lower()]
    try:
        value = type_(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"--{name} {shown_name(text)} is not {KINDS[type_]}; use one, such as {EXAMPLES[type_]}")
    if type_ is int and abs(value) > LARGEST:
        raise UserError(f"--{name} {shown_name(text)} is too large; use {LARGEST} or less")
    return value


def _replace(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: _replace(getattr(config, head), rest, value) if rest else value})
