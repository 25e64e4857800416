"""Checks that the fields of a dataclass hold what their annotations say: values come from files of others too."""

import math
import types
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dtgpt.errors import UserError, shown

KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False"}


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise UserError for the first field whose value is not of its annotated type: one of KINDS, a Literal, or None
    beside one of these. True and False are no numbers. Fields that are dataclasses themselves are looked into, those of
    other types left out."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if wanted := misfit(value, hint):
            raise UserError(f"{prefix}{name}={shown(value)} is of a wrong type; it must be {wanted}")
        if is_dataclass(hint):
            check_fields(value, f"{prefix}{name}.")


def misfit(value: Any, hint: Any) -> str | None:
    """Return what `value` must be to fit the annotation `hint`, in words; None if it fits."""
    choices = kinds_of(hint)
    if any(_fits(value, choice) for choice in choices):
        return None
    return " or ".join(_words(choice) for choice in choices)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the only kind that `hint` is."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, types.NoneType) or is_dataclass(kind) else True


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return f"{kind.__name__}(...)" if is_dataclass(kind) else KINDS.get(kind, "none")
