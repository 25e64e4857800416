"""Command-line options as values of a config's fields: `--optimizer.lr 3e-4` or `--optimizer.lr=3e-4`."""

import difflib
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import KINDS

LARGEST = 1 << 53  # far beyond any sensible size, and far from where products of sizes overflow
SWITCH = {"on": True, "true": True, "off": False, "false": False}
NEITHER = ("yes", "no", "1", "0", "y", "n")  # what other programs take for on and off
EXAMPLES = {int: "100", float: "0.1"}
REQUIRED = object()  # stands for the value of a field without a default
Options = dict[str, list[str]]  # the words of each option that was given; ["on"] for a bare flag


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (dotted name, type, description, value) of every field that is not itself a config. For a class of configs
    the values are its defaults, or REQUIRED."""
    hints = get_type_hints(config if isinstance(config, type) else type(config), include_extras=True)
    for f in fields(config):
        hint, name = hints[f.name], prefix + f.name
        value = getattr(config, f.name, hint if is_dataclass(hint) else REQUIRED)
        if is_dataclass(value):
            yield from leaves(value, name + ".")
        elif get_origin(hint) is Annotated:
            type_, description, *_ = get_args(hint)
            yield name, type_, description, value


def apply_overrides(config: Any, arguments: list[str]) -> Any:
    """Return `config` with the fields named in `arguments` replaced. Raises UserError as `read_words` does."""
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

    free: whether words may belong to no option. aliases: other names of fields. explain: returns a sentence about an
    option, or a choice, that does not exist here, by its name and value; None if it has none.
    Raises UserError for unknown names (with the nearest ones), unknown choices and missing values, all at once.
    """
    known = {name: type_ for config in reversed(configs) for name, type_, *_ in leaves(config)}
    alone: list[str] = []
    options: Options = {}
    problems: list[str] = []
    last, rest = "", list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            if free:
                alone.append(word)
            else:
                problems.append(_stray(word, rest, options.get(last), last))
                del rest[: len(_until_option(rest))]
            continue
        typed, equals, text = word[2:].partition("=")
        last = name = (aliases or {}).get(typed.replace("-", "_"), typed.replace("-", "_"))
        if name not in known:
            values = [text] if equals else _until_option(rest)
            del rest[: 0 if equals else len(values)]
            problems.append(
                explain(typed, " ".join(values)) or f"there is no option --{typed}; {_nearest(name, known)}"
            )
            continue
        values = [text] if equals else _values(word, rest, known[name], free)
        if get_origin(known[name]) is Literal and values and values[0] not in get_args(known[name]):
            choices = ", ".join(get_args(known[name]))
            default = f"--{typed} {shown_name(values[0])} is not a choice; use one of {choices}"
            problems.append(explain(typed, values[0]) or default)
            continue
        if not values:
            wanted = "at least one word after it" if get_origin(known[name]) is tuple else "a value"
            problems.append(f"--{typed} needs {wanted}: --{typed} {describe_type(known[name])}")
            continue
        if get_origin(known[name]) is tuple:
            values = [*options.get(name, []), *values]
        elif name in options:
            say(f"--{typed} is given twice; {shown(values[0])} replaces {shown(options[name][0])}", warning=True)
        options[name] = values
    if problems:
        heading = [f"{len(problems)} options cannot be used:"] if len(problems) > 1 else []
        raise UserError("\n  ".join([*heading, *problems]))
    return alone, options


def explain_for(architecture: str) -> Callable[[str, str], str | None]:
    """Return `explain` of `read_words` for options of recipes of an architecture, by what capabilities know of other
    programs."""

    def explain(name: str, value: str) -> str | None:
        found = (each.of_recipe(architecture, name, value) for each in seams.listed("explanations"))
        return next(filter(None, found), None)

    return explain


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


def value_text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def as_words(options: Options) -> list[str]:
    """Return the words of a command line that give these options."""
    return [word for name, values in options.items() for word in (f"--{name}={values[0]}", *values[1:])]


def describe_type(type_: Any) -> str:
    """Return the placeholder for a value of this type in `--help`: INT, TEXT ..., on|off."""
    if get_origin(type_) in (Union, types.UnionType):
        return "|".join(describe_type(t) if t is not type(None) else "none" for t in get_args(type_))
    if get_origin(type_) is Literal:
        return "|".join(get_args(type_))
    if get_origin(type_) is tuple:
        return f"{describe_type(get_args(type_)[0])} ..."
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "on|off"}[type_]


def _values(word: str, rest: list[str], type_: Any, free: bool) -> list[str]:
    """Return the words that belong to an option, removed from `rest`."""
    if get_origin(type_) is tuple:
        values = _until_option(rest)
        del rest[: len(values)]
        return values
    following = rest[0] if rest and not _is_option(rest[0]) else None
    if type_ is bool and (following is None or (free and following.lower() not in (*SWITCH, *NEITHER))):
        return ["on"]
    return [] if following is None else [rest.pop(0)]


def _until_option(words: list[str]) -> list[str]:
    return words[: next((i for i, word in enumerate(words) if _is_option(word)), len(words))]


def _is_option(word: str) -> bool:
    """Return whether a word begins an option. Several words in quotes, "--precision bf16", are a value."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def _stray(word: str, rest: list[str], values: list[str] | None, option: str) -> str:
    if values is None:
        return f"{shown(word)} is not an option; options look like --steps 100 (see --help)"
    whole = " ".join([*values, word, *_until_option(rest)])
    return (
        f"--{option} takes one value, but {shown(word)} follows it; put several words in quotes: --{option} {whole!r}"
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
    if get_origin(type_) is Literal:
        return text  # which `read_words` has checked
    if type_ is bool:
        if text.lower() not in SWITCH:
            raise UserError(f"--{name} {shown_name(text)} is not a choice; use on or off, or --{name} alone for on")
        return SWITCH[text.lower()]
    try:
        value = type_(text.replace("_", "")) if type_ in (int, float) else type_(text)
    except ValueError:
        value = math.nan
    if type_ is not str and not math.isfinite(value):
        raise UserError(f"--{name} {shown_name(text)} is not {KINDS[type_]}; use one, such as {EXAMPLES[type_]}")
    if type_ is int and abs(value) > LARGEST:
        raise UserError(f"--{name} {shown_name(text)} is too large; use {LARGEST} or less")
    return value


def _replace(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: _replace(getattr(config, head), rest, value) if rest else value})
