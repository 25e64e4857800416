"""The numbers that each option, field of a recipe and field of a model accepts, against a list of them.

`tests/fixtures/bounds.txt` says it a second time, a field a line, so that a limit that is wrong by one shows: tests
that read `Bounds` from the annotation compare it with itself. A new field is a new line there.
"""

import importlib
import inspect
import operator
import re
from dataclasses import is_dataclass, make_dataclass
from math import inf, nextafter
from pathlib import Path
from typing import get_args, get_type_hints

from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, check_annotations, kinds_of

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "fixtures" / "bounds.txt").read_text().splitlines()
TAKEN = {"from": operator.ge, "above": operator.gt, "to": operator.le, "below": operator.lt}


def bounded_fields():
    """Yield "Class.field" and the annotation of each field with bounds, of the class whose statement annotates it:
    `make_dataclass` repeats fields of others, under the name of its module since Python 3.12."""
    for path in sorted((ROOT / "dtgpt").rglob("*.py")):
        if "Bounds" in (text := path.read_text()):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name, owner in vars(module).items():
                if is_dataclass(owner) and re.search(rf"^class {name}\b", text, re.MULTILINE):
                    hints = get_type_hints(owner, include_extras=True)
                    for field in inspect.get_annotations(owner):
                        if any(isinstance(each, Bounds) for each in get_args(hints[field])):
                            yield f"{name}.{field}", hints[field]


def is_taken(name, config, value):
    """Return whether a dataclass with this field alone takes a value; what refuses it names the value."""
    try:
        check_annotations(config(value))
    except UserError as error:
        number = value[0] if isinstance(value, tuple) else value
        assert str(error).startswith(f"{name}={number} is out of range; use ")
        return False
    return True


def test_the_limits_of_every_field_are_taken_and_what_is_beyond_them_is_refused():
    listed, found = {name: words.split() for name, _, words in (line.partition(" ") for line in LINES)}, {}
    for field, hint in bounded_fields():
        kinds, name = kinds_of(get_args(hint)[0]), field.partition(".")[2]
        number, config = float if float in kinds else int, make_dataclass("Config", [(name, hint)])
        words = found[field] = listed.get(field, [])
        limits = [(TAKEN[word], number(limit)) for word, limit in zip(words[::2], words[1::2], strict=True)]
        for _, limit in limits:
            below, above = (limit - 1, limit + 1) if number is int else (nextafter(limit, -inf), nextafter(limit, inf))
            for value in (below, limit, above):
                wanted = all(keeps(value, other) for keeps, other in limits)
                if is_taken(name, config, value if number in kinds else (value,)) != wanted:
                    found[field] = [f"{value} is {'refused' if wanted else 'taken'}"]
    assert found == listed
