"""`oneOf` of a JSON schema, which llguidance takes as `anyOf` alone: the same where no value fits two alternatives."""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

MOST = 100  # alternatives that are compared with each other
TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
DEEPEST = 50


def one_of_is_any_of(schema: Any) -> bool:
    """Return whether the schema has alternatives of `oneOf`, and each value fits one of these at most: they differ in
    type, in their constants, or in a property that an object must have, as pydantic's tagged unions do."""
    try:
        found = list(_alternatives(schema))
        return bool(found) and all(
            len(each) <= MOST and all(_apart(a, b, schema) for a, b in combinations(each, 2)) for each in found
        )
    except RecursionError:
        return False


def _alternatives(part: Any) -> Iterator[list[Any]]:
    if isinstance(part, dict) and isinstance(part.get("oneOf"), list):
        yield part["oneOf"]
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _alternatives(inner)


def _apart(a: Any, b: Any, root: Any, depth: int = 0) -> bool:
    """Return whether no value fits both schemas, as far as this can be seen."""
    a, b = _resolved(a, root), _resolved(b, root)
    if not (isinstance(a, dict) and isinstance(b, dict)) or depth > DEEPEST:
        return False
    values, types = [_values(each) for each in (a, b)], [_types(each) for each in (a, b)]
    if None not in values and not set(values[0] or ()) & set(values[1] or ()):
        return True
    if None not in types and not set(types[0] or ()) & set(types[1] or ()):
        return True
    first, second = a.get("properties"), b.get("properties")
    if not (isinstance(first, dict) and isinstance(second, dict)) or ["object"] not in types:
        return False
    both = (name for name in (*_required(a), *_required(b)) if name in first and name in second)
    return any(_apart(first[name], second[name], root, depth + 1) for name in both)


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _values(schema: dict[str, Any]) -> list[str] | None:
    """Return the only values that fit, as JSON; None where there may be others."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list):
        return None
    return [json.dumps(float(v) if type(v) is int else v, sort_keys=True) for v in given]


def _types(schema: dict[str, Any]) -> list[str] | None:
    """Return the types that values may have; None where any."""
    given = schema.get("type")
    if given is None and (values := _values(schema)) is not None:
        return [TYPES.get(type(json.loads(value)), "null") for value in values]
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return None
    return ["number" if each == "integer" else each for each in found]


def _resolved(schema: Any, root: Any) -> Any:
    """Return what a schema that is nothing but a reference within the same file points to."""
    for _ in range(DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = root
        for word in reference[2:].split("/"):
            found = found.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return None
