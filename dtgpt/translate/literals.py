"""Values of expressions that are made of numbers, texts and names alone: nothing is called."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 10**18
LONGEST = 10_000  # characters
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def evaluate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Raises ValueError for one that has more than values, `names` and arithmetic,
    or is too large."""
    match node:
        case ast.Expression(body=body):
            return evaluate(body, names)
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=elements):
            return [evaluate(element, names) for element in elements]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return _apply(op, evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _apply(op, evaluate(left, names), evaluate(right, names))
    raise ValueError("not a literal")


def _apply(op: ast.AST, *values: Any) -> Any:
    if any(isinstance(value, list) for value in values):
        return _joined(op, *values)
    texts = not all(isinstance(value, int | float) for value in values)
    if texts and not isinstance(op, ast.Add):  # a text times or modulo a number may be endless
        raise ValueError("not numbers")
    if isinstance(op, ast.Pow) and (abs(values[1]) > 64 or abs(values[0]) > LARGEST):
        raise ValueError("too large")
    try:
        result = OPERATORS[type(op)](*values)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(str(error)) from None
    if isinstance(result, complex) or (len(result) > LONGEST if isinstance(result, str) else abs(result) > LARGEST):
        raise ValueError("too large")
    return result


def _joined(op: ast.AST, *values: Any) -> list:
    """Return the sum of two lists, or the product of a list and a number."""
    lengths = [len(value) if isinstance(value, list) else value for value in values]
    lists = sum(isinstance(value, list) for value in values)
    if not all(type(length) is int for length in lengths) or (type(op), lists) not in ((ast.Add, 2), (ast.Mult, 1)):
        raise ValueError("not lists")
    if (sum(lengths) if lists == 2 else math.prod(lengths)) > LONGEST:
        raise ValueError("too large")
    return OPERATORS[type(op)](*values)
