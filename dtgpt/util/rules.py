"""Rules about values that cannot stand together, as data.

A user's mistake is refused in one sentence, before time is spent: the value, the rule, the remedy. Most refusals are
alike, and as branches they drown what a function does. So they stand in tables beside the fields that they are about,
and one function checks a table:

    @dataclass(frozen=True, kw_only=True)
    class Schedule:
        steps: Annotated[int, "number of optimizer steps", Bounds(1)] = 100
        warmup: Annotated[int, "number of warmup steps", Bounds(0)] = 0
        rules: ClassVar[Rules] = (
            Rule("warmup={warmup} is above steps={steps}; lower it", Is("warmup", ">", Other("steps"))),
        )

`check_fields` (`dtgpt.util.field_types`) checks types and bounds of a dataclass, then its `rules`. Rules that need
other objects, such as a plan, stand in a table of their own, and `check_rules` is handed these by name. What a
condition cannot say is a property of one of the objects, of which a condition asks.
"""

import operator
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from dtgpt.util.errors import UserError, shown
from dtgpt.util.seams import OFF

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "in": lambda value, others: value in others,
    "not in": lambda value, others: value not in others,
    "is no multiple of": operator.mod,
}


class Other(NamedTuple):
    """In place of a value that a field is compared with: the value of the field of this name."""

    name: str


class Values:
    """The values that rules name: of a dataclass or a mapping, and of other objects by the names that they are handed
    over with. A name may have dots: `optimizer.lr`."""

    def __init__(self, config: Any, others: Mapping[str, Any]):
        self.config, self.others = config, others

    def __getitem__(self, head: str) -> Any:
        if head in self.others:
            return self.others[head]
        return self.config.get(head) if isinstance(self.config, Mapping) else getattr(self.config, head)

    def look(self, name: str) -> Any:
        """Return the value of a dotted name."""
        head, _, rest = name.partition(".")
        return attrgetter(rest)(self[head]) if rest else self[head]

    def default(self, name: str) -> Any:
        """Return the default of a field of a dataclass."""
        place, _, last = name.rpartition(".")
        owner = self.look(place) if place else self.config
        return next(field.default for field in fields(owner) if field.name == last)


class Condition:
    """What a rule asks of the fields of these names: one of them has to fit."""

    def __init__(self, *names: str):
        self.names = names

    def fits(self, values: Values, name: str) -> bool:
        """Return whether it holds for the field of this name."""
        raise NotImplementedError

    def fitting(self, values: Values) -> Iterator[str]:
        """Yield the names of the fields for which it holds."""
        return (name for name in self.names if self.fits(values, name))


class Given(Condition):
    """A field has a value that asks for something, none of OFF."""

    def fits(self, values: Values, name: str) -> bool:
        return values.look(name) not in OFF


class Missing(Condition):
    """A field asks for nothing."""

    def fits(self, values: Values, name: str) -> bool:
        return values.look(name) in OFF


class Changed(Condition):
    """A field does not have its default."""

    def fits(self, values: Values, name: str) -> bool:
        return values.look(name) != values.default(name)


class Is(Condition):
    """A field has a relation, one of RELATIONS, to a value, or to that of an `Other` field."""

    def __init__(self, name: str, relation: str, value: Any):
        super().__init__(name)
        self.relation, self.value = relation, value

    def fits(self, values: Values, name: str) -> bool:
        other = values.look(self.value.name) if isinstance(self.value, Other) else self.value
        return bool(RELATIONS[self.relation](values.look(name), other))


class Rule:
    """Values that cannot stand together: the sentence about them, said where all `conditions` hold.

    The sentence has values in braces, by the names that conditions use: `{optimizer.lr:g}`; with `!r` a value is quoted
    and shortened. `{field}`, `{option}` (with dashes), `{value}` and `{default}` are those of each field for which the
    first condition holds. `{remedy}` is what the function `remedy` returns for the config: a computed value.
    """

    def __init__(self, sentence: str, *conditions: Condition, remedy: Callable[[Any], str] | None = None):
        self.sentence, self.conditions, self.remedy = sentence, conditions, remedy

    def problems(self, values: Values) -> Iterator[str]:
        """Yield the sentence for each field of the first condition where the others hold, too. A condition is asked
        only where those before it hold."""
        first, *others = self.conditions
        for name in first.fitting(values):
            if all(any(other.fitting(values)) for other in others):
                yield _Sentence(values, name, self.remedy).format(self.sentence)


Rules = Sequence[Rule]


def check_rules(rules: Rules, config: Any, **others: Any) -> None:
    """Raise UserError for the first rule that the values of a dataclass, or a mapping, break. others: further objects,
    by the names that rules have for them."""
    for sentence in broken(rules, config, **others):
        raise UserError(sentence)


def broken(rules: Rules, config: Any, **others: Any) -> Iterator[str]:
    """Yield a sentence for each field that breaks a rule, in the order of the rules."""
    values = Values(config, others)
    for rule in rules:
        yield from rule.problems(values)


class _Sentence(string.Formatter):
    """Puts values into the sentence of a rule, which is about `field`."""

    def __init__(self, values: Values, field: str, remedy: Callable[[Any], str] | None):
        self._values, self._field, self._remedy = values, field, remedy

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        match key:
            case "field":
                return self._field
            case "option":
                return self._field.replace("_", "-")
            case "value":
                return self._values.look(self._field)
            case "default":
                return self._values.default(self._field)
            case "remedy" if self._remedy is not None:
                return self._remedy(self._values.config)
        return self._values[str(key)]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return shown(value) if conversion == "r" else super().convert_field(value, conversion)
