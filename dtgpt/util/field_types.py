"""What a field of a dataclass may hold: its type, bounds and patterns, which stand in its annotation.

`steps: Annotated[int, "number of optimizer steps", Bounds(1)] = 100` is a whole number of 1 or more. Recipes, options
of commands and shapes of models are such dataclasses, and every value of a user passes `check_fields` before it is
used. What several values may not be together is in `rules` of the dataclass (`dtgpt.util.rules`).
"""

import functools
import math
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import check_rules

KINDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "True or False",
    types.NoneType: "none",
    tuple: "a list of texts",
}


@dataclass(frozen=True)
class Bounds:
    """The numbers that a field accepts. also: the end of the message, such as what a special value means."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: str = ""

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value and what to use instead, None where nothing is."""
        if all(keeps(value, limit) for limit, keeps, _ in self._limits()):
            return None
        return f"is out of range; use {self}{self.also}"

    def _limits(self) -> list[tuple[float, Callable[[Any, Any], bool], str]]:
        limits = [
            (self.at_least, operator.ge, "{} or more"),
            (self.above, operator.gt, "more than {}"),
            (self.at_most, operator.le, "at most {}"),
            (self.below, operator.lt, "less than {}"),
        ]
        return [(limit, keeps, words) for limit, keeps, words in limits if limit is not None]

    def __str__(self) -> str:
        return " and ".join(words.format(limit) for limit, _, words in self._limits())


@dataclass(frozen=True)
class Pattern:
    """The texts that a field accepts: a regular expression, and the end of the message about any other text."""

    expression: str
    message: str

    def problem(self, value: Any) -> str | None:
        return None if re.fullmatch(self.expression, value, re.DOTALL) else self.message


PATH = Pattern(".+", "is not a path; give one, or leave it out")


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise UserError for the first field that breaks its annotation, then for the first of the `rules` that is broken:
    those of the sections, then those of the dataclass, which may be about all of them."""
    check_annotations(config, prefix)
    check_all_rules(config)


def check_all_rules(config: Any) -> None:
    """Raise UserError for the first broken one of the `rules` of a dataclass's sections, then of its own."""
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            check_all_rules(value)
    check_rules(getattr(config, "rules", ()), config)


def check_annotations(config: Any, prefix: str = "") -> None:
    """Raise UserError for the first field whose value does not have its annotated type or is out of its bounds.

    A type is one of KINDS, a Literal, a dataclass, whose fields are checked too, or a union of these; fields of other
    types are skipped. True and False are not numbers.
    """
    for name, hint, extras in annotations(config.__class__):
        value, full_name = getattr(config, name), prefix + name
        if wanted := misfit(value, hint):
            raise UserError(f"{full_name}={shown(value)} is not valid; use {wanted}")
        for rule in extras:
            if isinstance(rule, Bounds | Pattern):
                check_value(full_name, value, rule)
        if is_dataclass(hint):
            check_annotations(value, f"{full_name}.")


def changed_fields(config: Any) -> set[str]:
    """Return the names of the fields whose values are not their defaults."""
    return {field.name for field in fields(config) if getattr(config, field.name) != field.default}


def check_value(name: str, value: Any, rule: Bounds | Pattern) -> None:
    """Raise UserError where `value`, or one of several, breaks `rule`. None breaks none."""
    for each in value if isinstance(value, tuple) else (value,):
        if each is not None and (problem := rule.problem(each)):
            raise UserError(f"{name}={shown(each)} {problem}")


@functools.cache  # Python evaluates all annotations of a class each time that it is asked
def annotations(kind: type) -> tuple[tuple[str, Any, list[Any]], ...]:
    """Return (name, type, what else its annotation says) of every field of a class of dataclasses: the help text, if it
    is an option, then bounds and patterns."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((field.name, *_parts_of(hints[field.name])) for field in fields(kind))


def _parts_of(hint: Any) -> tuple[Any, list[Any]]:
    hint, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return hint, extras


def misfit(value: Any, hint: Any) -> str | None:
    """Return what `value` must be to fit the annotation `hint`, in words; None if it fits."""
    choices = kinds_of(hint)
    if any(_fits(value, choice) for choice in choices):
        return None
    return " or ".join(_words(choice) for choice in choices)


@functools.cache
def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the only kind that `hint` is."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, and not an integer that no float is near to."""
    try:
        return (type(value) is int or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return isinstance(value, tuple) and all(_fits(item, get_args(kind)[0]) for item in value)
    return isinstance(value, kind) if kind in KINDS or is_dataclass(kind) else True


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple and get_args(kind)[0] is int:
        return "a list of whole numbers"
    return KINDS.get(get_origin(kind) or kind) or f"{kind.__name__}(...)"
