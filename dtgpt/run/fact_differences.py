"""In what two runs differ besides their curves: recipe, data, execution, code and versions, field by field."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from dtgpt.config.overrides import value_text
from dtgpt.run.facts import Piece, Run
from dtgpt.run.starts import flat
from dtgpt.util.errors import shown_name

NOT_RECORDED = "not recorded"
# How a step is computed: its result may differ by rounding.
EXECUTION = (
    "plan", "world", "micro_batch_size", "precision", "attention", "recompute", "compile", "graph", "device",
)  # fmt: skip
# Fields of a recipe without influence on a curve; of these sections, all but what is measured on the way.
WITHOUT_INFLUENCE = ("name", "timeout", "runs", "resume", "exit_after", "exit_interval")
SECTIONS = ("log.", "checkpoint.")
MEASURES = ("log.eval_samples", "log.eval_tasks", "log.eval_tasks_limit")
MASKS = ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss")  # what is done with the tokens
MACHINE = ("python", "platform", "cuda", "packages")  # of environment.json
MOST_PIECES = 4  # of a run that are named for a field


class Field(NamedTuple):
    """A field with its values in both runs."""

    name: str
    a: str
    b: str


class Group(NamedTuple):
    """The fields of a kind in which two runs differ. missing: those that one run has not recorded."""

    title: str
    fields: list[Field]
    missing: list[Field]
    without: str  # runs that have not recorded the kind, as in "A and B"

    @property
    def is_equal(self) -> bool:
        return not self.without and not self.fields


def differences(a: Run, b: Run) -> dict[str, Group]:
    """Return the groups: "recipe" and "data" decide the curve, "code" and "versions" should not change it, "execution"
    changes its rounding alone, "other" fields do not change it."""
    pieces = a.pieces(), b.pieces()
    names = {name for own in pieces for piece in own for name in piece.facts}
    recipe = {name.removeprefix("recipe/") for name in names if name.startswith("recipe/")}
    data = {n for n in recipe if n.startswith("data.") and n not in MASKS}
    other = {n for n in recipe if n in WITHOUT_INFLUENCE or (n.startswith(SECTIONS) and n not in MEASURES)}
    tables = {name for name in recipe if name.startswith("plans.")}
    tokens = _group("data", ["start/data", "start/tokenizer"], pieces, "start/data")
    if not tokens.is_equal:
        tokens = _group("data", ["start/data", "start/tokenizer", *_of_recipe(data)], pieces, "start/data")
    else:
        other |= data
    execution = [_resolved(name, pieces) for name in EXECUTION] + _of_recipe(n for n in tables if _is_used(n, pieces))
    decides = recipe - data - other - tables - {*EXECUTION, "init_from"}
    code = _group("code", ["start/code"], pieces, "start/code")
    if not code.is_equal:
        code = _group("code", ["start/code", "start/git"], pieces, "start/code")
    if code.without:  # another revision may have the same code
        code = code._replace(fields=[], missing=code.missing + code.fields)
    found = [
        _group("recipe", _of_recipe(decides), pieces, "recipe/seed", [Field("init_from", *map(_initial, pieces))]),
        tokens,
        code,
        _group("execution", execution, pieces, execution[0]),
        _versions(a, b, pieces),
        _group("other", _of_recipe(other), pieces, "recipe/seed"),
    ]
    return {group.title: group for group in found}


def _of_recipe(names: Iterable[str]) -> list[str]:
    return [f"recipe/{name}" for name in sorted(names)]


def _initial(pieces: list[Piece]) -> str:
    """Return what the run began with: `init_from`, or the run of another library that it went on with."""
    first = pieces[0]
    return first.facts.get("recipe/resume" if first.begin > 0 else "recipe/init_from", NOT_RECORDED)


def _resolved(name: str, pieces: tuple[list[Piece], list[Piece]]) -> str:
    """Return the fact to compare for a field of `EXECUTION`: what `auto` meant, where both runs have recorded that."""
    known = all(any(f"start/{name}" in piece.facts for piece in own) for own in pieces)
    return f"start/{name}" if known else f"recipe/{name}"


def _is_used(name: str, pieces: tuple[list[Piece], list[Piece]]) -> bool:
    """Return whether a field belongs to a plan of the recipe's own that a run was trained under."""
    plans = {piece.facts.get("recipe/plan") for own in pieces for piece in own}
    return any(name.startswith(f"plans.{plan}.") for plan in plans)


def _group(
    title: str, names: list[str], pieces: tuple[list[Piece], list[Piece]], key: str, more: Iterable[Field] = ()
) -> Group:
    """Return the group of the facts `names` and of `more` fields. A run has recorded it if it has recorded the fact
    `key` of each of its pieces."""
    fields = [Field(name.partition("/")[2], *(over_time(own, name) for own in pieces)) for name in names]
    return _split(title, [*more, *fields], [all(key in piece.facts for piece in own) for own in pieces])


def _split(title: str, fields: list[Field], recorded: list[bool]) -> Group:
    differing = [field for field in fields if field.a != field.b]
    missing = [field for field in differing if any(text.startswith(NOT_RECORDED) for text in field[1:])]
    without = " and ".join(letter for letter, known in zip("AB", recorded, strict=True) if not known)
    return Group(title, [field for field in differing if field not in missing], missing, without)


def over_time(pieces: list[Piece], name: str) -> str:
    """Return the value of a fact as `dp2`, or `dp2 to step 40, then tp2` where it has changed."""
    values = [(piece.begin, piece.facts.get(name, NOT_RECORDED)) for piece in pieces]
    parts = [next(same) for _, same in groupby(values, key=lambda pair: pair[1])]
    text = parts[0][1]
    for begin, value in parts[1:MOST_PIECES]:
        text += f" to step {begin}, then {value}"
    left = len(parts) - MOST_PIECES
    return text if left <= 0 else f"{text} and {left} more"


def _versions(a: Run, b: Run, pieces: tuple[list[Piece], list[Piece]]) -> Group:
    """Return the versions of torch over time, and those of other packages in the last start."""
    torch = Field("torch", *(over_time(own, "start/torch") for own in pieces))
    one, other = (flat({name: value for name, value in run.environment.items() if name in MACHINE}) for run in (a, b))
    fields = [
        Field(name.removeprefix("packages."), *(_text(values, name) for values in (one, other)))
        for name in sorted((one.keys() | other.keys()) - {"packages.torch"})
    ]
    return _split("versions", [torch, *fields], [bool(one), bool(other)])


def _text(values: dict[str, Any], name: str) -> str:
    return shown_name(value_text(values[name])) if name in values else NOT_RECORDED


def code_changes(a: Run, b: Run) -> list[str]:
    """Return the names of dtgpt's source files that differ between the last starts of two runs; none where a run has
    not recorded them."""
    one, other = a.code_files, b.code_files
    if not one or not other:
        return []
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
