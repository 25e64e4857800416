"""Faults of one place, drawn at random from the functions that tests run: for `planted_faults.py --drawn`.

A fault exchanges an operator, negates a condition, counts one more, or leaves a call out. Some change nothing that can
be seen (a hint for speed, a message's width): what the tests find before and after they were changed is to be compared,
not the share that they find.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from faults import Fault

ROOT = Path(__file__).resolve().parents[1]
COMPARED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
COUNTED = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//"}
# Messages, and what is not executed.
PASSED_OVER = (ast.Raise, ast.JoinedStr, ast.arguments)
Edit = tuple[int, int, str]  # from, to, what is written in between


class Text:
    """The text of a file, with offsets of nodes of its syntax tree in bytes."""

    def __init__(self, content: bytes):
        self.content = content
        self._lines = [0]
        for line in content.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def begin(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def exchange(self, begin: int, end: int, words: dict[str, str]) -> Iterator[Edit]:
        """Yield the edit of the operator that stands alone between two operands."""
        text = self.content[begin:end].decode()
        if text.strip() in words:
            yield begin, end, text.replace(text.strip(), words[text.strip()])


def edits(text: Text, node: ast.AST) -> Iterator[Edit]:
    """Yield the changes that a node allows."""
    begin, end = text.begin, text.end
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from text.exchange(end(left), begin(right), COMPARED)
        case ast.BinOp(left=left, right=right):
            yield from text.exchange(end(left), begin(right), COUNTED)
        case ast.BoolOp(values=[first, second, *_]):
            yield from text.exchange(end(first), begin(second), {"and": "or", "or": "and"})
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield begin(test), end(test), f"(not ({text.content[begin(test) : end(test)].decode()}))"
        case ast.Constant(value=bool(value)):
            yield begin(node), end(node), str(not value)
        case ast.Constant(value=int(value)):
            yield begin(node), end(node), str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield begin(node), end(node), "pass"


def nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function does, without what is passed over."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, PASSED_OVER):
            yield child
            yield from nodes(child)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module by their qualified names, without those in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def fault_of(path: str, name: str, text: Text, edit: Edit) -> Fault | None:
    """Return an edit as a change of whole lines that are there once; None where they cannot be."""
    begin, end, new = edit
    content = text.content
    first = content.rfind(b"\n", 0, begin) + 1
    last = (content.find(b"\n", end) + 1) or len(content)
    number = content.count(b"\n", 0, begin) + 1
    while content.count(content[first:last]) > 1 and first > 0:
        first = content.rfind(b"\n", 0, first - 1) + 1
    old = content[first:last].decode()
    changed = (content[first:begin] + new.encode() + content[end:last]).decode()
    shown = f"{content[begin:end].decode()} -> {new}".replace("\n", " ")
    return Fault(f"{path}:{number} {name}: {shown[:100]}", path, old, changed) if first else None


def draw_faults(count: int, seed: int) -> Iterator[Fault]:
    """Yield faults in functions of `dtgpt/` that recorded tests execute, one in a function."""
    sys.path.insert(0, str(ROOT))
    from tests.support.recorded_map import RECORD, load_record

    record = load_record(RECORD)
    if record is None:
        sys.exit(f"{RECORD} is no record: python -m pytest -n 3 --record-map makes it")
    executed = sorted(words for words in record.used if words.startswith("dtgpt/") and ".py:" in words)
    draw = random.Random(seed)
    draw.shuffle(executed)
    for words in executed:
        path, _, name = words.partition(":")
        if not count:
            return
        if not (ROOT / path).exists():
            continue
        text = Text((ROOT / path).read_bytes())
        function = dict(functions(ast.parse(text.content))).get(name)
        found = [edit for node in nodes(function) for edit in edits(text, node)] if function else []
        fault = fault_of(path, name, text, draw.choice(found)) if found else None
        if fault is not None:
            count -= 1
            yield fault
