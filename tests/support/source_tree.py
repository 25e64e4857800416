"""A tree of sources under git: what differs from a commit, and which file uses what of which other one."""

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.source_units import Source, read_source


class NoCommit(ValueError):
    """What a change is compared with is no commit."""


class Tree:
    """The working tree of a repository, or the tree of a commit, and the commit with which it is compared."""

    def __init__(self, root: Path, commit: str, until: str | None = None, files: Path | None = None):
        """until, files: a commit, and a folder with its files, in place of the working tree."""
        self.root, self.until, self.files = root, until, files or root
        done = self._git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        if done is None:
            raise NoCommit(f"--changed={commit} names no commit; write paths before --changed")
        self.base = done.strip()

    def _git(self, *words: str) -> str | None:
        done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, errors="replace")
        return done.stdout if done.returncode == 0 else None

    def changes(self, since: str, until: str | None = None) -> list[tuple[str | None, str | None]]:
        """Return (old path, new path) of files that differ; None where there is none. until: this tree."""
        last = until or self.until
        parts = iter(
            (self._git("diff", "--name-status", "-M", "-z", since, *([last] if last else [])) or "").split("\0")
        )
        found: list[tuple[str | None, str | None]] = []
        for status in filter(None, parts):
            path = next(parts)
            if status[0] == "R":
                found.append((path, next(parts)))
            else:
                found.append((None if status == "A" else path, None if status == "D" else path))
        if last is None:
            new = (self._git("ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
            found += [(None, path) for path in new if path]
        return found

    def old(self, path: str, commit: str = "") -> str:
        return self._git("show", f"{commit or self.base}:{path}") or ""

    def new(self, path: str) -> str:
        try:
            return (self.files / path).read_text(errors="replace")
        except OSError:
            return ""

    def knows(self, commit: str) -> bool:
        return bool(commit) and self._git("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def python_files(self) -> list[str]:
        """Return the Python files of the tree, untracked ones included."""
        words = (
            ["ls-tree", "-r", "--name-only", self.until] if self.until else ["ls-files", "-co", "--exclude-standard"]
        )
        names = set((self._git(*words, "-z") or "").split("\0"))
        return sorted(name for name in names if name.endswith(".py") and (self.files / name).exists())


def main_branch(root: Path) -> str:
    """Return the commit at which HEAD has left the main branch."""
    for branch in ("main", "origin/main", "master"):
        done = subprocess.run(["git", "merge-base", "HEAD", branch], cwd=root, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return "HEAD"


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Graph:
    """The sources of a tree, parsed where they are needed."""

    def __init__(self, tree: Tree):
        self.tree, self.paths = tree, tree.python_files()
        self._texts: dict[str, str] = {}
        self._sources: dict[str, Source] = {}

    def text(self, path: str) -> str:
        if path not in self._texts:
            self._texts[path] = self.tree.new(path) or self.tree.old(path)
        return self._texts[path]

    def source(self, path: str) -> Source:
        if path not in self._sources:
            self._sources[path] = parse(self.text(path), path)
        return self._sources[path]

    def users_of(self, path: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield (file, the name there) of the files that can use a name of `path`, itself included."""
        yield path, name
        module, last = module_of(path), module_of(path).rpartition(".")[2]
        word = re.compile(rf"\b{re.escape(name)}\b")
        for other in self.paths:
            text = self.text(other)
            if other == path or last not in text or not word.search(text):
                continue
            source = self.source(other)
            for alias, of in source.aliases.items():
                if of in ((module, name), (module.partition(".")[0], name)):  # the package offers some names itself
                    yield other, alias
            if module in source.whole:
                yield other, name

    def naming(self, path: str) -> set[str]:
        """Return the sources that may open a file which none imports: promises, and those that name it or a folder
        that it is in."""
        if path.startswith(("dtgpt/", "tests/")) and path.endswith(".py"):
            return set()
        *folders, last = path.split("/")
        words = [last, *(f'"{folder}"' for folder in folders), *(f"{folder}/" for folder in folders[:1])]
        return {
            other
            for other in self.paths
            if other.startswith(("dtgpt/", "tests/"))
            and (other.startswith("tests/promises/") or any(word in self.text(other) for word in words))
        }

    def reached_from(self, changed: Iterable[str]) -> set[str]:
        """Return the files whose imports reach one of these, by imports in functions and names in texts, too."""
        paths = {module_of(path): path for path in self.paths}
        importers: dict[str, set[str]] = defaultdict(set)
        for path in self.paths:
            for module in imported(self.text(path)):
                parts = module.split(".")
                for length in range(1, len(parts) + 1):  # the packages, whose code runs first
                    if found := paths.get(".".join(parts[:length])):
                        importers[found].add(path)
        reached, waiting = set(), list(changed)
        while waiting:
            path = waiting.pop()
            if path not in reached:
                reached.add(path)
                waiting += importers[path]
                if path.endswith("conftest.py"):
                    waiting += [other for other in self.paths if other.startswith(os.path.dirname(path) + "/")]
        return reached


def imported(text: str) -> set[str]:
    """Return the modules that a source imports or names in a text, and names that may be modules, without a parser."""
    found = set(re.findall(r"""["']((?:dtgpt|tests)[.][\w.]+)""", text))
    for names in re.findall(r"^\s*import\s+([\w., ]+)", text, re.MULTILINE):
        found |= {name.split()[0] for name in names.split(",") if name.strip()}
    for module, names in re.findall(r"^\s*from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n]*)", text, re.MULTILINE):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return found


def parse(text: str, path: str) -> Source:
    try:
        return read_source(
            text, module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
        )
    except SyntaxError:
        return Source()
