"""Command-line overrides of a recipe: `--optimizer.lr 3e-4` or `--optimizer.lr=3e-4`, and the generated `--help`."""

import difflib
import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dtgpt.errors import UserError

LARGEST = 1 << 53  # far beyond any sensible size, and far from where products of sizes overflow


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """(dotted name, type, description, value) of every field that is not itself a config."""
    hints = get_type_hints(type(config), include_extras=True)
    for f in fields(config):
        value, hint, name = getattr(config, f.name), hints[f.name], prefix + f.name
        if is_dataclass(value):
            yield from leaves(value, name + ".")
        elif get_origin(hint) is Annotated:
            type_, description = get_args(hint)
            yield name, type_, description, value


def apply_overrides(config: Any, arguments: list[str]) -> Any:
    """`config` with the fields named in `arguments` replaced. '-' and '_' in names are the same.

    Raises UserError for a name that does not exist (with the nearest one), a missing value or one of a wrong type.
    """
    known = {name: type_ for name, type_, _, _ in leaves(config)}
    for name, text in _pairs(arguments):
        if name not in known:
            raise UserError(f"there is no option --{name}; {_nearest(name, list(known))}")
        if text is None:
            raise UserError(f"--{name} needs a value: --{name} {_describe(known[name])}")
        config = _replace(config, name, _parse(name, text, known[name]))
    return config


def help_text(config: Any, doc: str, program: str) -> str:
    """The recipe's docstring and a line for every option, with type, default and description."""
    lines = [doc.strip(), "", f"usage: {program} [--option value ...]", ""]
    rows = [(f"--{n} {_describe(t)}", f"{d}  [{_show(v)}]") for n, t, d, v in leaves(config)]
    width = min(max(len(left) for left, _ in rows), 44)
    for left, right in rows:
        lines += [f"  {left:<{width}}  {right}"] if len(left) <= width else [f"  {left}", f"  {'':<{width}}  {right}"]
    return "\n".join(lines)


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r} is not an option; options look like --steps 100 (see --help)")
        name, equals, text = word[2:].partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        yield name.replace("-", "_"), text


def _nearest(name: str, known: list[str]) -> str:
    last_parts = {}
    for full in known:
        last_parts.setdefault(full.rsplit(".", 1)[-1], full)
    leaf = name.rsplit(".", 1)[-1]
    matches = [last_parts[leaf]] if leaf in last_parts else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not matches:
        matches = [last_parts[m] for m in difflib.get_close_matches(leaf, last_parts, n=1, cutoff=0.6)]
    return f"did you mean --{matches[0]}?" if matches else "see --help for the list"


def _parse(name: str, text: str, type_: Any) -> Any:
    if get_origin(type_) in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        (type_,) = (t for t in get_args(type_) if t is not type(None))
    if get_origin(type_) is Literal:
        if text not in get_args(type_):
            raise UserError(f"--{name} {text}: not one of {', '.join(get_args(type_))}")
        return text
    try:
        value = type_(text.replace("_", "")) if type_ in (int, float) else type_(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[type_]
        raise UserError(f"--{name} {text}: not {kind}") from None
    if type_ is float and not math.isfinite(value):
        raise UserError(f"--{name} {text}: not a finite number")
    if type_ is int and abs(value) > LARGEST:
        raise UserError(f"--{name} {text}: too large; use {LARGEST} or less")
    return value


def _describe(type_: Any) -> str:
    if get_origin(type_) in (Union, types.UnionType):
        return "|".join(_describe(t) if t is not type(None) else "none" for t in get_args(type_))
    if get_origin(type_) is Literal:
        return "|".join(get_args(type_))
    return {int: "INT", float: "FLOAT", str: "TEXT"}[type_]


def _show(value: Any) -> str:
    return {None: "none", "": "empty"}.get(value, str(value))


def _replace(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: _replace(getattr(config, head), rest, value) if rest else value})
