"""What recipe.json of a run says, held against the fields of today."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dtgpt.config.overrides import LARGEST
from dtgpt.run.saved_recipe import saved_value
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import kinds_of, misfit


def checked_values(
    run: Path, saved: dict[str, Any], types: Mapping[str, Any], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that a run keeps, by name, as dtgpt of today writes them. saved: all that recipe.json says, of
    which it is told what no field has. Raises UserError where a value is of another type."""
    try:
        unknown = list(_unknown(saved, set(types)))
    except ValueError as error:
        raise UserError(f"{run}/recipe.json says {error}; mend it") from None
    found = {}
    for name, value in kept.items():
        try:
            found[name] = _checked(value, types[name])
        except ValueError as error:
            said = shown(saved_value(saved, name))
            raise UserError(f"{run}/recipe.json says {name}={said}, {error}; give --{name}") from None
    if unknown:
        say(f"{run}/recipe.json has {', '.join(unknown)}, which this dtgpt does not know and ignores", warning=True)
    return found


def _checked(value: Any, hint: Any) -> Any:
    """Return a value if it fits a field's annotation, else raise ValueError."""
    if wanted := misfit(value, hint):
        raise ValueError(f"which is not {wanted}")
    if isinstance(value, str):
        os.fsencode(value)  # else it cannot be a path: its UnicodeEncodeError is a ValueError
    if type(value) is not int:
        return value
    try:
        if float in kinds_of(hint):
            return float(value)
        if abs(value) <= LARGEST:
            return value
    except OverflowError:
        pass
    raise ValueError("which is too large")


def _unknown(saved: dict[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the names in a recipe.json that no field has. Raises ValueError where a group of fields is none."""
    for key, value in saved.items():
        name = f"{prefix}{key}"
        if any(other.startswith(f"{name}.") for other in known):
            if not isinstance(value, dict):
                raise ValueError(f"{name}={shown(value)}, which must be an object")
            yield from _unknown(value, known, f"{name}.")
        elif name not in known and name != "plans":
            yield name[:60]
