"""The sentences that refuse wrong input, as tests see them, and the source lines that do nothing else.

    python -m pytest tests/config --record-refusals AFTER      # each test, and the sentences of the errors it saw
    python -m tests.support.refusals compare BEFORE AFTER      # sentences that are lost or changed
    python -m tests.support.refusals lines                     # lines of source that only refuse, by folder
    python -m tests.support.refusals rules                     # what the fields of a recipe may hold, and their rules

Refusals are written as tables of rules or as branches; what a user reads must not depend on that. A test seldom holds
the whole sentence. So a change of refusals is held against a record of the commit before it.
"""

import ast
import difflib
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dtgpt.config.recipe import Recipe
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, Pattern, annotations, misfit
from dtgpt.util.rules import Condition, Is, Other, Rules

HELP = "write the sentences of the UserErrors that each test saw, for python -m tests.support.refusals compare"
PACKAGE = Path(__file__).parents[2] / "dtgpt"
PROPERTY = "refusals"  # of the report of a test, which travels from the workers
ROOT = PACKAGE.parent
VARYING = (  # what differs between two runs of a test: folders of pytest and of tempfile, processes, addresses
    (r"\S*/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?/", "TMP/"),
    (r"TMP/(\w*?)\d+(?=[/ ,;:)]|$)", r"TMP/\1N"),
    (re.escape(f"{ROOT}/"), ""),
    (r"/tmp/[\w.-]+", "TMP"),
    (r"0x[0-9a-f]{6,}", "ADDRESS"),
    (r"\b[0-9a-f]{16,}\b", "HASH"),
    (r"\b(process|pid|port) \d+", r"\1 N"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:N"),
)


def normalised(sentence: str) -> str:
    """Return a sentence without what differs between two runs of the same test."""
    for expression, text in VARYING:
        sentence = re.sub(expression, text, sentence)
    return sentence


class Recorder:
    """In the process that runs tests: note each UserError that is made, and what ended programs said on stderr."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}  # in order, each once
        seen = self._seen
        user_init, ended_init = UserError.__init__, subprocess.CompletedProcess.__init__

        @functools.wraps(user_init)
        def init_error(error: UserError, *args: Any) -> None:
            user_init(error, *args)
            seen[normalised(str(error))] = None

        @functools.wraps(ended_init)
        def init_ended(process: Any, *args: Any, **named: Any) -> None:
            ended_init(process, *args, **named)
            errors = process.stderr.decode(errors="replace") if isinstance(process.stderr, bytes) else process.stderr
            for line in (errors or "").splitlines():
                if line.startswith("dtgpt: "):
                    seen[normalised(line.removeprefix("dtgpt: "))] = None

        UserError.__init__ = init_error  # type: ignore[method-assign]
        subprocess.CompletedProcess.__init__ = init_ended  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._seen.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        if call.when == "teardown":
            item.user_properties.append((PROPERTY, list(self._seen)))
        return (yield)


class Writer:
    """In the process that reports: write a line of JSON for each test that ended, [id, [sentence, ...]]."""

    def __init__(self, path: Path):
        self._path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            sentences = dict(report.user_properties).get(PROPERTY, [])
            with self._path.open("a") as file:
                file.write(json.dumps([report.nodeid, sentences]) + "\n")


def configure(config: Any) -> None:
    """Begin to record where pytest was asked to."""
    if not config.option.record_refusals:
        return
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(Writer(Path(config.option.record_refusals)))
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())


def read(path: Path) -> dict[str, list[str]]:
    """Return the sentences by test. Tests are named without their file, which may move."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        test, sentences = json.loads(line)
        found.setdefault(test.partition("::")[2], []).extend(map(normalised, sentences))
    return found


def compare(before: dict[str, list[str]], after: dict[str, list[str]]) -> Iterator[str]:
    """Yield lines on each sentence of a test in both records that no test of `after` saw."""
    known = {sentence for sentences in after.values() for sentence in sentences}
    told = set()
    for test in sorted(before.keys() & after.keys()):
        new = [sentence for sentence in after[test] if sentence not in before[test]]
        for sentence in before[test]:
            if sentence in known or sentence in told:
                continue
            told.add(sentence)
            near = difflib.get_close_matches(sentence, new, n=1, cutoff=0.3)
            yield f"{'changed' if near else 'lost'} in {test}"
            yield f"  - {sentence}"
            yield from (f"  + {text}" for text in near)
    missing = before.keys() - after.keys()
    yield f"{len(told)} sentences lost or changed; {len(missing)} tests of the first record are not in the second"


def refusing_lines(tree: ast.Module) -> int:
    """Count the lines of statements that raise UserError, with the branches that hold nothing else."""
    return sum(_refusing(statement) for statement in tree.body)


def _refusing(node: ast.stmt) -> int:
    if isinstance(node, ast.Raise):
        return _length(node) if "Error" in ast.unparse(node.exc or ast.Constant("")) else 0
    inner = [each for name in ("body", "orelse", "finalbody") for each in getattr(node, name, [])]
    for handler in getattr(node, "handlers", []):
        inner += handler.body
    lines = sum(map(_refusing, inner))
    only_refuses = isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in inner)
    return lines + _length(node.test) if only_refuses and lines and isinstance(node, ast.If) else lines


def _length(node: ast.stmt | ast.expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def count_lines() -> tuple[Counter[str], Counter[str]]:
    """Return refusing lines and raise statements, each by folder of the package."""
    lines, raises = Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        folder, tree = path.relative_to(PACKAGE).parent.as_posix(), ast.parse(path.read_text())
        lines[folder] += refusing_lines(tree)
        raises[folder] += sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
    return lines, raises


class Listed(NamedTuple):
    """What a field may hold, or a rule: of which fields, its kind, what it asks for (a rule: what it forbids), and the
    sentence of who breaks it, with values in braces."""

    field: str
    kind: str
    values: str
    sentence: str


def listed_rules(kind: type, prefix: str = "") -> Iterator[Listed]:
    """Yield what the fields of a dataclass and of its sections may hold, and the rules that stand beside them."""
    for name, hint, checks in annotations(kind):
        full = prefix + name
        if isinstance(hint, type) and is_dataclass(hint):
            yield from listed_rules(hint, f"{full}.")
            continue
        words = misfit(object(), hint)  # None where any value fits
        if words is not None:
            yield Listed(full, "type", words, f"{full}={{value!r}} is not valid; use {words}")
        for check in checks:
            if isinstance(check, Pattern):
                yield Listed(full, "pattern", check.expression, f"{full}={{value!r}} {check.message}")
            elif isinstance(check, Bounds):
                yield Listed(full, "bounds", str(check), f"{full}={{value!r}} is out of range; use {check}{check.also}")
    for table in (name for name in dir(kind) if name == "rules" or name.endswith("_rules")):
        # Those of a section that are about more than itself have the recipe's names, or those of the objects they need.
        yield from tell_rules(getattr(kind, table), prefix if table == "rules" else "")


def tell_rules(rules: Rules, prefix: str = "") -> Iterator[Listed]:
    """Yield each rule, by the fields that its first condition is about. prefix: of the names in the rules."""
    for rule in rules:
        first = ", ".join(prefix + name for name in rule.conditions[0].names)
        yield Listed(first, "rule", " and ".join(map(_words_of, rule.conditions)), rule.sentence)


def main(words: list[str]) -> int:
    """Run one of the commands above, and return the exit code."""
    match words:
        case ["compare", before, after]:
            for line in compare(read(Path(before)), read(Path(after))):
                print(line)
        case ["lines"]:
            lines, raises = count_lines()
            for folder in sorted(raises):
                if raises[folder]:
                    print(f"{folder:32} {lines[folder]:5} lines {raises[folder]:5} raise statements")
            print(f"{'all':32} {lines.total():5} lines {raises.total():5} raise statements")
        case ["rules"]:
            for one in listed_rules(Recipe):
                print(f"{one.field}: {one.kind}: {one.values}\n    {one.sentence}")
        case _:
            print(__doc__)
            return 2
    return 0


def _words_of(condition: Condition) -> str:
    if not isinstance(condition, Is):
        return f"{' or '.join(condition.names)} is {type(condition).__name__.lower()}"
    value = condition.value.name if isinstance(condition.value, Other) else repr(condition.value)
    return f"{condition.names[0]} {condition.relation} {value}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
