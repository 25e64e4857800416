"""What a source file consists of, so that a change can be named: functions, and names at module level.

A unit is a function or method with what is defined in it, a class without its methods, or all statements that bind one
name of the module. Two texts of a unit are the same where their syntax trees are, docstrings of functions left out:
comments and layout are no change. Docstrings of classes and modules are part of help texts, and count.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
COMPOUND = ast.If | ast.Try | ast.With | ast.For | ast.While
EFFECT = "*"  # the name of statements that bind none
CACHE = re.compile(r"\b(lru_)?cache\b")


@dataclass
class Source:
    """The units of a file: the syntax of each as text, and which identifiers it uses."""

    functions: dict[str, str] = field(default_factory=dict)  # "function", "Class.method" -> text
    names: dict[str, str] = field(default_factory=dict)  # bound at module level: also the decorators of each function
    used: dict[str, set[str]] = field(default_factory=dict)  # identifiers, by function
    used_by_names: dict[str, set[str]] = field(default_factory=dict)  # likewise, in what binds a name
    aliases: dict[str, tuple[str, str]] = field(default_factory=dict)  # `from MODULE import NAME as alias`
    modules: set[str] = field(default_factory=set)  # imported anywhere in the file, or named in a text
    whole: set[str] = field(
        default_factory=set
    )  # those of `modules` that are imported as such: their names are attributes
    called: set[str] = field(default_factory=set)  # names whose statements call something
    kernels: set[str] = field(default_factory=set)  # functions that a compiler reads and Python does not execute
    cached: set[str] = field(
        default_factory=set
    )  # functions that are executed once in a process for the same arguments


def read_source(text: str, package: str = "") -> Source:
    """Return the units of a file's text. package: of the file, for relative imports. Raises SyntaxError."""
    source, tree = Source(), ast.parse(text)
    _add_statements(source, tree.body, "", "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            source.modules |= {alias.name for alias in node.names}
            source.whole |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                source.modules |= {module, f"{module}.{alias.name}"}
                source.whole.add(f"{module}.{alias.name}")
                source.aliases[alias.asname or alias.name] = (module, alias.name)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("dtgpt.", "tests."))
        ):
            source.modules.add(node.value.partition(":")[0])
    return source


def _add_statements(source: Source, body: Iterable[ast.stmt], prefix: str, condition: str) -> None:
    """Add the statements of a module, or of a block or a class in it. prefix: of names in a class, with a dot."""
    for node in body:
        if isinstance(node, FUNCTION):
            name = prefix + node.name
            source.functions[name] = source.functions.get(name, "") + condition + _dump(node)
            source.used[name] = source.used.get(name, set()) | identifiers(node)
            owner = prefix.partition(".")[0] or node.name
            decorators: list[ast.AST] = [*node.decorator_list]
            if any("jit" in ast.unparse(decorator) for decorator in decorators):
                source.kernels.add(name)
            if any(CACHE.search(ast.unparse(decorator)) for decorator in decorators):
                source.cached.add(name)
            decorators += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            if prefix:
                _bind(source, owner, node.name + condition, [])  # the class has this method
            _bind(source, name, condition, decorators)
        elif isinstance(node, ast.ClassDef):
            owner = (prefix or node.name).partition(".")[0]
            _bind(source, owner, f"class {node.name}{condition}", [*node.decorator_list, *node.bases, *node.keywords])
            _add_statements(source, node.body, f"{prefix}{node.name}.", condition)
        elif isinstance(node, COMPOUND):
            heads = [node.test] if isinstance(node, ast.If | ast.While) else []
            inner = condition + "".join(map(ast.dump, heads))
            for part in _blocks(node):
                _add_statements(source, part, prefix, inner)
            if heads:
                for name in {bound for part in _blocks(node) for each in part for bound in _bound(each)}:
                    _bind(source, prefix.partition(".")[0] or name, "", heads)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                module = getattr(node, "module", "") or ""
                _bind(source, prefix.partition(".")[0] or name, f"{condition}{module} ", [alias])
        else:
            for name in _bound(node) or {EFFECT}:
                _bind(source, prefix.partition(".")[0] or name, condition, [node])


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body


def _bind(source: Source, name: str, extra: str, nodes: list) -> None:
    source.names[name] = source.names.get(name, "") + extra + "".join(map(ast.dump, nodes))
    found = source.used_by_names.setdefault(name, set())
    for node in nodes:
        found |= identifiers(node, annotations=True)
        if any(isinstance(each, ast.Call) for each in ast.walk(node)):
            source.called.add(name)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds in its module."""
    if isinstance(node, FUNCTION | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return {"__doc__"}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


def _dump(node: ast.AST) -> str:
    """Return the syntax of a function as text, without docstrings of functions."""
    for each in ast.walk(node):
        if isinstance(each, FUNCTION) and ast.get_docstring(each, clean=False) is not None:
            each.body = each.body[1:] or [ast.Pass()]
    return ast.dump(node)


def identifiers(node: ast.AST, annotations: bool = False) -> set[str]:
    """Return the identifiers that a piece of syntax uses. annotations: those in annotations, too."""
    found, waiting = set(), [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.alias):
            found |= set(each.name.split("."))
        for name, value in ast.iter_fields(each):
            if annotations or name not in ("annotation", "returns"):
                waiting += [
                    part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST)
                ]
    return found


def differences(old: Source, new: Source) -> tuple[set[str], set[str]]:
    """Return the functions and the names at module level that differ, were added, or were removed."""
    functions = {
        name for name in {*old.functions, *new.functions} if old.functions.get(name) != new.functions.get(name)
    }
    return functions, {name for name in {*old.names, *new.names} if old.names.get(name) != new.names.get(name)}
