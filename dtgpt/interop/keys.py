"""Keys of the files of other libraries, as tables: what each may say, and what is said of a file that says otherwise.

A file names many things that dtgpt takes in one way only. In place of a branch for each, an architecture has a table,
key -> `Key`, which `check_keys` holds against the file; `read_key` does so for one key, and returns its value.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.util.errors import UserError, shown

SMALLEST_NUMBER, LARGEST_NUMBER = 5e-324, 1e12  # of what is no size: any number above 0
LARGEST_WHOLE = (1 << 62) - 1


class Key(NamedTuple):
    """What a key may say: `fits` is true of its value, or of `default` where it is missing. `says`: how the sentence
    about another value goes on, after "FILE has KEY=VALUE"."""

    fits: Callable[[Any], bool]
    says: str
    default: Any = None


Keys = Mapping[str, Key]


def among(values: Iterable[Any]) -> Callable[[Any], bool]:
    """Return what is true of values that equal one of these."""
    known = tuple(values)

    def fits(value: Any) -> bool:
        return value in known

    return fits


def just(known: Any) -> Callable[[Any], bool]:
    """Return what is true of this value alone: True is not 1."""

    def fits(value: Any) -> bool:
        return type(value) is type(known) and value == known

    return fits


def whole(least: int, most: int = LARGEST_WHOLE) -> Callable[[Any], bool]:
    """Return what is true of whole numbers in these bounds."""

    def fits(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return fits


def number(least: float) -> Callable[[Any], bool]:
    """Return what is true of numbers from `least` on."""

    def fits(value: Any) -> bool:
        return type(value) in (int, float) and least <= value < LARGEST_NUMBER

    return fits


def is_off(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, 0 or an empty list."""
    return not value


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_optional_flag(value: Any) -> bool:
    return value is None or type(value) is bool


def is_whole(value: Any) -> bool:
    return type(value) is int


def is_fraction(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def not_here(why: str) -> str:
    """Return how a sentence goes on about a model that dtgpt does not have."""
    return f"; {why}: give another model"


WHOLE = Key(is_whole, ", which is not a whole number; give the file as it was written")
POSITIVE = Key(whole(1), "; it must be a whole number of 1 or more")
EPSILON = Key(is_fraction, "; it must be more than 0 and less than 1")
NUMBER = Key(
    number(SMALLEST_NUMBER),
    f", which is not a number between 0 and {LARGEST_NUMBER:g}; give the file as it was written",
)
FLAG = Key(is_flag, "; the key is true or false: correct it")


def check_keys(settings: Mapping[str, Any], keys: Keys, place: Path | str) -> None:
    """Raise UserError for the first key that says what it may not."""
    for name, key in keys.items():
        read_key(settings, (name,), key, place, settings.get(name, key.default))


def read_key(
    settings: Mapping[str, Any], names: Sequence[str], key: Key, place: Path | str, default: Any = None
) -> Any:
    """Return the value of the first of `names` that is there, and not null; else `default`. Raise UserError for what
    does not fit."""
    value = next((settings[name] for name in names if settings.get(name) is not None), default)
    if not key.fits(value):
        raise UserError(f"{place} has {names[0]}={written(value, place)}{key.says}")
    return value


def whole_number(settings: Mapping[str, Any], names: Sequence[str], default: int | None, place: Path) -> int:
    """Return the whole number under the first of `names` that is there. Raise UserError for another value."""
    return read_key(settings, names, WHOLE, place, default)


def written(value: Any, place: Path | str) -> str:
    """Return a value as the file has it, shortened."""
    is_word = value is None or isinstance(value, bool)
    return json.dumps(value) if is_word and str(place).endswith(".json") else shown(value)


def check_aliases(settings: Mapping[str, Any], names: Mapping[str, str], place: Path) -> None:
    """Raise UserError where two names of one number say different ones, of which libraries take either. names: one by
    the other."""
    for one, other in names.items():
        said = [settings.get(name) for name in (one, other)]
        if None not in said and said[0] != said[1]:
            raise UserError(
                f"{place} has both {one}={shown(said[0])} and {other}={shown(said[1])}, which are two names of one "
                "number; leave out the one that is not the model's"
            )
