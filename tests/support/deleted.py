"""Copies of dtgpt from which capabilities are deleted: their folders, their lines in `dtgpt/capabilities.py`, and the
tests that import what is deleted.

    python -m tests.support.deleted           # which tests of the core need a capability; writes their names

A test of the core is one whose file, and all that it imports of `tests/`, names modules of the core alone. Some of them
use a capability all the same, by an option of a recipe. `tests/promises/core_tests.json` has their names and the number
of all others, which run with every capability deleted.
"""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dtgpt.capabilities import CAPABILITIES
from tests.support.core import PACKAGE, ROOT, files, room_of
from tests.support.fresh import run_fresh
from tests.support.source_tree import module_of

RECORD = ROOT / "tests" / "promises" / "core_tests.json"
# Of a capability, and kept: the pool of processes in which tests run ranks, and what it asks of torch.
RIG = {"dtgpt.compare.fuzz.pool", "dtgpt.compare.torch_private"}
# Tests of the whole repository: of its pages, of its faults, of what imports what.
OF_ALL = "promises"
# Of bytecode, which is copied: it says of which time and size its source is.
UNFINISHED = shutil.ignore_patterns("*.pyc.*")
LINES = re.compile(r"^CAPABILITIES.*?^\)", re.DOTALL | re.MULTILINE)
# How a test ended, by its name: spaces stand in the brackets of a case alone, and a reason, which a wide terminal
# shows, may hold brackets too.
ENDS = re.compile(r"^(PASSED|FAILED|ERROR) (tests[^\s\[]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)


def delete(target: Path, removed: Iterable[str]) -> set[str]:
    """Write a copy of the package and of recipes into the folder `target`, without the modules of the capabilities
    `removed`; return their names. Without all of them, nothing but the core is left."""
    gone = tuple(f"{capability}." for capability in removed)
    left = tuple((name, needs) for name, needs in CAPABILITIES if f"{name}." not in gone)
    for folder in ("dtgpt", "recipes"):
        shutil.copytree(ROOT / folder, target / folder, ignore=UNFINISHED)
    known = files()
    deleted = {name for name, path in known.items() if _is_deleted(name, path, gone, only_core=not left)}
    kept = [f"{name}." for name in known.keys() - deleted]
    for name in deleted:
        path = target / known[name].relative_to(ROOT)
        # A package of which a module stays is emptied.
        path.write_text("") if any(other.startswith(f"{name}.") for other in kept) else path.unlink()
    for folder in sorted((target / "dtgpt").rglob("*/"), reverse=True):
        if not any(each.suffix == ".py" for each in folder.rglob("*")):  # else it could be imported, as a namespace
            shutil.rmtree(folder)
    listed = target / "dtgpt" / "capabilities.py"
    listed.write_text(LINES.sub(f"CAPABILITIES = {left}", listed.read_text(), count=1))
    return deleted


def copy_tests(target: Path, deleted: set[str]) -> None:
    """Copy the tests into a copy of the package, without those that import what is deleted."""
    shutil.copytree(ROOT / "tests", target / "tests", ignore=UNFINISHED)
    shutil.copy(ROOT / "pyproject.toml", target)
    for path in _tests_of(deleted):
        (target / path.relative_to(ROOT)).unlink()


def _is_deleted(name: str, path: Path, gone: tuple[str, ...], only_core: bool) -> bool:
    if name in RIG or path == PACKAGE / "moved.py":
        return False
    if f"{name}.".startswith(gone):
        return True
    return only_core and room_of(path) is None and path.name != "__init__.py"


def _tests_of(deleted: set[str]) -> list[Path]:
    """Return the files of tests that import what is deleted, at once or through others."""
    paths = {module_of(str(path.relative_to(ROOT))): path for path in (ROOT / "tests").rglob("*.py")}
    imported = {name: set(_imports(ast.parse(path.read_text()))) for name, path in paths.items()}
    found: set[str] = set()
    known, wrong = files(), deleted
    while more := {name for name, others in imported.items() if name not in found and others & wrong}:
        found |= more
        wrong = more
    return [path for name, path in paths.items() if name in found or _tests_what_is_gone(path, known, deleted)]


def _tests_what_is_gone(path: Path, known: Iterable[str], deleted: set[str]) -> bool:
    """Return whether a file of tests stands in the folder of a package of which nothing is left."""
    package = "dtgpt." + ".".join(path.relative_to(ROOT / "tests").parts[:-1])
    modules = {name for name in known if name.startswith(f"{package}.")} - RIG
    return bool(modules) and modules <= deleted


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a file imports when it is imported itself: not what is imported for types, or within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.With | ast.Try):
            yield from _imports(node)


def run_core_tests(target: Path, *words: str) -> dict[str, str]:
    """Run the quick tests of the core in a copy without any capability; return how each ended by its name."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": str(target), "DTGPT_CACHE": str(target / "cache")}
    command = ["-m", "pytest", "-q", "-rA", "-m", "quick", "-p", "no:cacheprovider", "--tb=line"]
    done = run_fresh([*command, f"--ignore=tests/{OF_ALL}", "tests", *words], target, environment)
    ends = ENDS.findall(done.stdout)
    if not ends:
        raise AssertionError(done.stdout[-4000:] + done.stderr[-4000:])
    return {name: end for end, name in ends}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        copy_tests(Path(place), delete(Path(place), [name for name, _ in CAPABILITIES]))
        ended = run_core_tests(Path(place), *sys.argv[1:])
    need = sorted(name for name, end in ended.items() if end != "PASSED")
    RECORD.write_text(json.dumps({"passed": len(ended) - len(need), "need a capability": need}, indent=1) + "\n")
    print(f"{len(ended) - len(need)} tests pass with the core alone; {len(need)} need a capability")
