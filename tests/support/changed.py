"""`--changed[=COMMIT]`: run the tests that a change concerns, by the record of which test executed which function.

What a record cannot see is looked up in the sources: a name at module level concerns the tests that executed a function
which uses it, through imports and other names; a function with a cache those that ask for its result; a kernel or a
CUDA source those of its folder; any other file those that read it. Without a record, all tests whose imports reach a
changed file are chosen.
"""

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.budgets import LIMIT
from tests.support.recorded_map import RECORD, ROOT, Record, load_record
from tests.support.source_tree import Graph, NoCommit, Tree, main_branch, module_of, parse
from tests.support.source_units import EFFECT, Source, differences

STALE = 0.25  # of the package's files changed since the record: it is not used
KERNELS = (".cu", ".cuh")
PROMISES = "tests/promises/"  # those that take less than a second are chosen with each change
CHOICE = "DTGPT_CHOSEN_TESTS"  # environment variable: the file that says to workers what was chosen
KEY = pytest.StashKey["Choice"]()
HELP = "run the tests that the changes since COMMIT concern (default: where HEAD left the main branch)"


@dataclass
class Choice:
    """Tests to run, each with the reason that was found first, and the sentences that say so."""

    tests: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # all tests of a file, also those that the record lacks
    known: set[str] = field(default_factory=set)  # tests in the record; others are chosen where imports reach
    reached: set[str] = field(default_factory=set)  # files of tests whose imports reach a change
    seconds: dict[str, float] = field(default_factory=dict)  # of the tests in the record
    lines: list[str] = field(default_factory=list)

    def reason(self, test: str) -> str | None:
        """Return why a test is to run, None where it is not."""
        file = test.partition("::")[0]
        is_new = test not in self.known and file in self.reached
        return self.tests.get(test) or self.files.get(file) or ("imports" if is_new else None)


class Selection:
    """The search for tests that a change concerns."""

    def __init__(self, tree: Tree, record: Record, changes: list[tuple[str | None, str | None]]):
        self.tree, self.record, self.changes = tree, record, changes
        self.graph = Graph(tree)
        self.choice = Choice(known=set(record.seconds), seconds=record.seconds)
        self._then = {new: old for old, new in tree.changes(record.commit) if old and new} if record.commit else {}
        self._later = self._changed_later()
        self._used_in: dict[str, list[str]] = defaultdict(list)  # words of the functions of a file
        for words in record.used:
            self._used_in[words.partition(":")[0]].append(words)
        self._spread: set[tuple[str, str]] = set()
        self._test_folders = {os.path.dirname(file) for file in self.graph.paths} | {""}
        self._found = False  # whether the record names a test of what is looked up
        self.counts: Counter[str] = Counter()

    def run(self) -> Choice:
        """Return the tests to run."""
        for old, new in self.changes:
            path = new or old or ""
            if path.endswith(".py"):
                self._python(old, new)
            else:
                self.counts["other files"] += 1
            self._readers(old, new)
            if path.endswith(KERNELS):
                self._folder(path)
        if self.changes:
            self._walks()
        return self.choice

    def _walks(self) -> None:
        """Choose quick promises, and tests that read sources of the package, which compare whole trees."""
        for words in self.record.used:
            if words.startswith(("read dtgpt/", "list dtgpt")):
                self._add(words, "walks")
        for test, seconds in self.record.seconds.items():
            if test.startswith(PROMISES) and seconds < LIMIT:
                self.choice.tests.setdefault(test, "promises")

    def _add(self, words: str, reason: str) -> None:
        """Choose the tests that used what the words name; names of a file whose import used it are changed, too."""
        self._found |= words in self.record.used
        for test in self.record.used.get(words, ()):
            if test.startswith("import "):
                file = test.removeprefix("import ")
                if os.path.basename(file).startswith("test_"):
                    self.choice.files.setdefault(file, reason)
                for name in self.graph.source(file).called:
                    self._name(file, name)
            else:
                self.choice.tests.setdefault(test, reason)

    def _function(self, path: str, name: str, reason: str) -> None:
        """Choose the tests that executed a function, or one that has begun to use it after the record."""
        waiting, seen = [(path, name)], {(path, name)}
        while waiting:
            path, name = waiting.pop()
            self._add(f"{self._then.get(path, path)}:{name}", reason)
            for holder, kept in self._cached(path, name):
                self._name(holder, kept)
            users = {user for user, used in self._later.items() if name.rpartition(".")[2] in used} - seen
            if users and path.startswith("tests/"):  # for those that do not import it, this is another of that name
                importers = self.graph.reached_from({path})
                users = {user for user in users if user[0] in importers}
                if os.path.basename(path).startswith("test_"):
                    self.choice.files.setdefault(path, reason)
            seen |= users
            waiting += users

    def _cached(self, path: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield the functions with a cache that are this one or use it, directly or by other functions of its file: the
        first test of a process that asks for their result executes it, and no later one."""
        source = self.graph.source(path)
        if name in source.cached:
            yield path, name
        waiting = [name.rpartition(".")[2]]
        seen = {*waiting}
        while waiting:
            used = waiting.pop()
            for holder, local in self.graph.users_of(path, used):
                other = self.graph.source(holder)
                yield from ((holder, each) for each in other.cached if local in other.used[each])
            callers = {user.rpartition(".")[2] for user, names in source.used.items() if used in names} - seen
            seen |= callers
            waiting += callers

    def _changed_later(self) -> dict[tuple[str, str], set[str]]:
        """Return what the functions use that have changed between the record and the commit of the comparison."""
        found = {}
        for old, new in self.tree.changes(self.record.commit, self.tree.base) if self.record.commit else ():
            if new and new.endswith(".py") and not os.path.basename(new).startswith("test_"):
                before = parse(self.tree.old(old, self.record.commit), old) if old else Source()
                after = parse(self.tree.old(new), new)
                found |= {(new, name): after.used.get(name, set()) for name in differences(before, after)[0]}
        return found

    def _file(self, path: str, reason: str) -> None:
        """Choose the tests that executed any function of a file."""
        for words in self._used_in[self._then.get(path, path)]:
            self._add(words, reason)

    def _python(self, old: str | None, new: str | None) -> None:
        path = new or old or ""
        before = parse(self.tree.old(old), old) if old else Source()
        after = parse(self.tree.new(new), new) if new else Source()
        if new and not after.functions and not after.names and self.tree.new(new).strip():
            self._file(path, "syntax")  # it cannot be parsed
        functions, names = differences(before, after)
        self.counts["functions"] += len(functions)
        for name in functions:
            self._found = False
            self._function(old or path, name, "executed")
            self._function(path, name, "executed")
            if name in before.kernels | after.kernels:
                self._name(path, name)
                self._folder(path)
            self._unknown(path)
        is_test = os.path.basename(path).startswith("test_")
        module_names = names - functions
        self.counts["names at module level"] += len(module_names)
        for name in names:
            if is_test and name in module_names:
                self.choice.files.setdefault(path, "its module level")
            if name not in before.functions or name not in after.functions:  # else: a default or a decorator
                self._found = False
                self._name(path, name)
                if name != "__doc__":
                    self._unknown(path)
        if path.startswith("dtgpt/") and module_names - before.aliases.keys() - after.aliases.keys():
            self._neighbours(path)
        if os.path.basename(path) == "conftest.py" and module_names:
            folder = os.path.dirname(path)
            self.choice.files |= {file: "conftest" for file in self.graph.paths if file.startswith(f"{folder}/")}
        if path.startswith("dtgpt/") and (functions or names):
            self._add("unseen", "starts a Python of its own")

    def _name(self, path: str, name: str) -> None:
        """Choose the tests that executed a function which uses a name of a module, through other names, too."""
        waiting = [(path, name)]
        while waiting:
            path, name = waiting.pop()
            if (path, name) in self._spread:
                continue
            self._spread.add((path, name))
            if name == EFFECT:
                self._file(path, "module level")
            for function in self.graph.source(path).functions:
                if function == name or function.startswith(f"{name}."):
                    self._function(path, function, "module level")
            self._by_text(path, name)
            for holder, local in self.graph.users_of(path, name):
                source = self.graph.source(holder)
                for function, used in source.used.items():
                    if local in used:
                        self._function(holder, function, "module level")
                for other, used in source.used_by_names.items():
                    if local in used and other in source.functions and other not in source.kernels:
                        self._function(holder, other, "module level")  # a default or a decorator
                    elif local in used:
                        waiting.append((holder, other))
                if os.path.basename(holder).startswith("test_") and any(
                    local in used
                    for other, used in source.used_by_names.items()
                    if other not in source.aliases and other not in source.functions
                ):
                    self.choice.files.setdefault(holder, "module level")

    def _neighbours(self, path: str) -> None:
        """Choose the quick tests of the folder that belongs to a file of the package: which of them look at a table, or
        at an attribute of a class, through another object, no record says."""
        folder = os.path.dirname(path).replace("dtgpt", "tests", 1)
        while folder not in self._test_folders:
            folder = os.path.dirname(folder)
        for test, seconds in self.record.seconds.items() if folder != "tests" else ():
            if test.startswith(f"{folder}/") and seconds < LIMIT:
                self.choice.tests.setdefault(test, "folder")

    def _unknown(self, path: str) -> None:
        """Choose, where no recorded test has executed what was looked up, those that may: the files that import this
        helper of tests. A process that is killed, or replaced by a program, leaves no record."""
        if not self._found and path.startswith("tests/"):
            for file in self.graph.reached_from({path}):
                if os.path.basename(file).startswith("test_"):
                    self.choice.files.setdefault(file, "imports")

    def _by_text(self, path: str, name: str) -> None:
        """Choose the tests of a file that is imported by a text which names this object or, with its folder, the
        module: seams of capabilities do."""
        texts = {other: self.graph.text(other) for other in self.graph.paths if other.startswith("dtgpt/")}
        if any(f"{module_of(path)}:{name}" in text for text in texts.values()):
            self._file(path, "module level")
        if f'"{module_of(path)}"' in texts.get("dtgpt/capabilities.py", ""):
            for other in self.graph.paths:
                if other.startswith(os.path.dirname(path) + "/"):
                    self._file(other, "module level")

    def _readers(self, old: str | None, new: str | None) -> None:
        """Choose the tests that read the file, and those that list its folder where a name came or went."""
        for path in filter(None, {old, new}):
            self._add(f"read {self._then.get(path, path)}", "read")
            if old != new:
                self._add(f"list {os.path.dirname(path)}", "read")
        path = new or old or ""
        is_fixture = path.startswith("tests/fixtures/") and not self.record.used.get(f"read {path}")
        for words in list(self.record.used) if is_fixture else ():  # a library may have read it
            if words.startswith((f"read {os.path.dirname(path)}", f"list {os.path.dirname(path)}")):
                self._add(words, "read")

    def _folder(self, path: str) -> None:
        """Choose the tests that executed a function of the folder of a source that Python does not execute."""
        folder = os.path.dirname(path)
        for other in self.graph.paths:
            if os.path.dirname(other) == folder:
                self._file(other, "kernel")
        self.choice.files |= {
            file: "kernel"
            for file in self.graph.paths
            if os.path.basename(file).startswith("test_")
            and any(module.startswith(folder.replace("/", ".")) for module in self.graph.source(file).modules)
        }


def why_no_record(tree: Tree, record: Record | None) -> str:
    """Return why the record is of no use; empty where it is."""
    if record is None or not record.seconds:
        return "there is no record"
    if not tree.knows(record.commit):
        return f"the record is of {record.commit[:8]}, which is no ancestor"
    package = [path for path in tree.python_files() if path.startswith("dtgpt/")]
    since = [new for old, new in tree.changes(record.commit, tree.base) if old in (None, new) and new in set(package)]
    if len(since) > STALE * len(package):
        return f"the record is stale: {len(since)} of {len(package)} files have changed since {record.commit[:8]}"
    return ""


def choose(root: Path, commit: str, record: Record | None) -> Choice:
    """Return the tests that the changes since a commit concern. Raises NoCommit."""
    tree = Tree(root, commit or main_branch(root))
    changes = tree.changes(tree.base)
    problem = why_no_record(tree, record)
    selection = Selection(tree, Record() if problem or record is None else record, changes)
    choice = selection.run()
    reached = selection.graph.reached_from(
        {other for pair in changes for path in filter(None, pair) for other in (path, *selection.graph.naming(path))}
    )
    choice.reached = {path for path in reached if os.path.basename(path).startswith("test_")}
    counts = ", ".join(f"{number} {what}" for what, number in selection.counts.items() if number)
    choice.lines = [f"changed since {tree.base[:8]}: {counts or 'nothing that a test can see'}"]
    if problem or record is None:
        choice.lines.append(
            f"{problem}; pytest --record-map makes one: all tests of files whose imports reach a change"
        )
        choice.lines.append(f"chosen: {len(choice.reached)} files of tests")
        return choice
    reasons = Counter(filter(None, map(choice.reason, record.seconds)))
    said = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    choice.lines.append(f"by the record of {record.commit[:8]}: {said or 'none'}")
    share = 100 * seconds_of(choice, record) / max(0.1, sum(record.seconds.values()))
    choice.lines.append(
        f"chosen: {reasons.total()} of {len(record.seconds)} recorded tests, {share:.0f} % of their CPU seconds, and of"
        " others those whose imports reach the change"
    )
    return choice


def seconds_of(choice: Choice, record: Record) -> float:
    """Return the CPU seconds that chosen tests took when they were recorded."""
    return sum(seconds for test, seconds in record.seconds.items() if choice.reason(test))


def configure(config: Any) -> None:
    """Choose once, in the process that pytest was started as; its workers read what was chosen."""
    if config.option.changed is None:
        return
    if CHOICE in os.environ and hasattr(config, "workerinput"):
        content = json.loads(Path(os.environ[CHOICE]).read_text())
        sets = {name: set(content[name]) for name in ("known", "reached")}
        config.stash[KEY] = Choice(**content | sets)
        return
    try:
        choice = config.stash[KEY] = choose(ROOT, config.option.changed, load_record(RECORD))
    except NoCommit as error:
        raise pytest.UsageError(str(error)) from error
    with tempfile.NamedTemporaryFile("w", prefix="dtgpt-changed-", delete=False) as file:
        json.dump(asdict(choice), file, default=sorted)
    os.environ[CHOICE] = file.name


def finish(config: Any) -> None:
    """Delete what workers have read."""
    if config.option.changed is not None and not hasattr(config, "workerinput") and CHOICE in os.environ:
        os.remove(os.environ.pop(CHOICE))


def deselect(config: Any, items: list[Any]) -> None:
    """Leave the tests out that were not chosen."""
    if (choice := config.stash.get(KEY, None)) is not None:
        left_out = [item for item in items if choice.reason(item.nodeid) is None]
        items[:] = [item for item in items if choice.reason(item.nodeid) is not None]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
        seconds = Counter[str]()
        for item in items:
            seconds[item.nodeid.partition("::")[0]] += choice.seconds.get(item.nodeid, LIMIT)
        items.sort(key=lambda item: seconds[item.nodeid.partition("::")[0]])  # a fault shows early; files stay whole
