"""Values of expressions that are made of numbers, texts and names alone: nothing is called."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 10**18
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


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
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return _apply(op, evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _apply(op, evaluate(left, names), evaluate(right, names))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return _apply(op, evaluate(left, names), evaluate(right, names))
    raise ValueError("not a literal")


def _apply(op: ast.AST, *values: Any) -> Any:
    numbers = [value for value in values if isinstance(value, int | float)]
    if isinstance(op, ast.Pow) and (len(numbers) < 2 or abs(numbers[1]) > 64 or abs(numbers[0]) > LARGEST):
        raise ValueError("too large")
    if isinstance(op, ast.Mult) and len(numbers) < 2:
        raise ValueError("not a number")
    try:
        result = OPERATORS[type(op)](*values)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(str(error)) from None
    if isinstance(result, int | float) and abs(result) > LARGEST:
        raise ValueError("too large")
    return result
