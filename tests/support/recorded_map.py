"""The record of a run of the tests: which test executed which function, and read which file. `--record-map` makes it.

The record is a file of the repository, renewed by the whole run before a landing and by no other: so a clone has it
without a further step, a bisection finds that of its commit, and `--changed` needs no network. A run of some tests
renews their part. Where two branches have renewed it, take either, and record again before the next landing.
"""

import json
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import call_log, covered_lines
from tests.support.budgets import asks_for_all
from tests.support.cpu_seconds import clock

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "recorded_map.xz"
FOLDER = "DTGPT_CALLS_OF_TESTS"  # environment variable: where the workers of a recording run write
TIMES = 1.6  # as long as another run takes one that records, at least: before Python 3.12 several times
HELP = "record which test executes which function, for --changed; Python 3.12 and later slow a run down least"
FIXTURE = "fixture "  # before the name of what is set up once for several tests


@dataclass
class Record:
    """What tests used: `used[words]` are ids of tests, and of imports (`import FILE`) and shared fixtures, too."""

    commit: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # of a test's processes on a CPU, while recorded
    used: dict[str, set[str]] = field(default_factory=dict)

    def merge(self, newer: "Record", is_whole: bool) -> "Record":
        """Return the newer record, with the tests of this one that the newer run did not have. is_whole: it had all."""
        if is_whole or not self.commit:
            return newer
        used = defaultdict(set, {words: set(tests) for words, tests in newer.used.items()})
        for words, tests in self.used.items():
            used[words] |= {test for test in tests if test not in newer.seconds}
        return Record(
            newer.commit, self.seconds | newer.seconds, {words: tests for words, tests in used.items() if tests}
        )

    def save(self, path: Path) -> None:
        """Write the record: each set of tests that occurs is kept once, as runs of numbers of tests."""
        names = sorted(set(self.seconds).union(*self.used.values()))
        numbers = {name: number for number, name in enumerate(names)}
        sets: dict[str, int] = {}
        used = {}
        for words in sorted(self.used):
            text = " ".join(_runs(sorted(numbers[test] for test in self.used[words])))
            used[words] = sets.setdefault(text, len(sets))
        tenths = [round(10 * self.seconds[name]) if name in self.seconds else -1 for name in names]
        content = {"commit": self.commit, "names": names, "tenths": tenths, "sets": list(sets)}
        content |= {"words": list(used), "set_of": list(used.values())}
        text = json.dumps(content, separators=(",", ":"))
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def load_record(path: Path) -> Record | None:
    """Return the record of a file; None where there is none that can be read."""
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        names, words = content["names"], content["words"]
        sets = [{names[number] for number in _numbers(text)} for text in content["sets"]]
        seconds = {name: tenths / 10 for name, tenths in zip(names, content["tenths"], strict=True) if tenths >= 0}
        return Record(
            content["commit"], seconds, {word: sets[i] for word, i in zip(words, content["set_of"], strict=True)}
        )
    except (OSError, lzma.LZMAError, ValueError, KeyError, IndexError):
        return None


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield `first` or `first-length` of each run of numbers, `first` counted from the end of the run before."""
    end, index = 0, 0
    while index < len(numbers):
        length = 1
        while index + length < len(numbers) and numbers[index + length] == numbers[index] + length:
            length += 1
        yield f"{numbers[index] - end}" + (f"-{length}" if length > 1 else "")
        end, index = numbers[index] + length, index + length


def _numbers(text: str) -> Iterator[int]:
    end = 0
    for run in text.split():
        first, _, length = run.partition("-")
        begin = end + int(first)
        end = begin + int(length or 1)
        yield from range(begin, end)


class Recorder:
    """In the process that runs tests: number the tests, and let descendants know which one runs."""

    def __init__(self, folder: Path, with_lines: bool = False):
        self.folder = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))
        call_log.write_hook(str(self.folder), with_lines=with_lines)
        path = [str(self.folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        self._log = call_log.start(str(self.folder), with_lines)
        self._numbers: dict[str, int] = {}
        self._now = 0
        clock()

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 1
            with (self.folder / "names").open("a") as file:
                file.write(json.dumps([self._numbers[name], name]) + "\n")
        return self._numbers[name]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        before = clock().now()
        self._now = self._number(item.nodeid)
        with (self.folder / "fixtures").open("a") as file:
            shared = [name_of(fixture) for fixture in shared_fixtures(item)]
            file.write(json.dumps([item.nodeid, shared]) + "\n")
        self._log.follow()  # which the test before may have ended
        self._log.begin(self._now)
        try:
            return (yield)
        finally:
            self._log.begin(0)
            self._now = 0
            with (self.folder / "seconds").open("a") as file:
                file.write(json.dumps([item.nodeid, round(clock().now() - before, 3)]) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note tests that have not passed, whose calls say little of what they use: where packages are missing, or on
        other machines, they may do more."""
        if report.outcome != "passed":
            with (self.folder / "undone").open("a") as file:
                file.write(json.dumps(report.nodeid) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """What is made once for several tests belongs to each test that asks for it."""
        if fixturedef.scope == "function":
            return (yield)
        test = self._now
        self._now = self._number(name_of(fixturedef))
        self._log.begin(self._now)
        try:
            return (yield)
        finally:
            self._now = test
            self._log.begin(test)


def shared_fixtures(item: Any) -> list[Any]:
    """Return the definitions of the fixtures of a test that other tests share."""
    found = getattr(item, "_fixtureinfo", None)
    lists = found.name2fixturedefs.values() if found else ()
    return [fixture for fixtures in lists for fixture in fixtures if fixture.scope != "function"]


def name_of(fixture: Any) -> str:
    return f"{FIXTURE}{fixture.baseid}::{fixture.argname}"


def read_workers(folder: Path, commit: str) -> Record:
    """Return the record of what the workers of a run have written, of tests that have passed. A test without a function
    of its own file was not followed, and is not in the record either."""
    record, used, undone = Record(commit), defaultdict[str, set[str]](set), set[str]()
    for worker in sorted(folder.glob("worker-*")):
        undone |= set(_lines(worker / "undone"))
        names = dict(_lines(worker / "names"))
        words = {call_log.checksum(line): line for line in call_log.read_lines(worker, "words")}
        imports = {
            call_log.import_number(line.removeprefix("import ")): line
            for line in words.values()
            if line.startswith("import ")
        }
        users: dict[str, list[str]] = defaultdict(list)  # of shared fixtures
        for test, fixtures in _lines(worker / "fixtures"):
            for fixture in fixtures:
                users[fixture].append(test)
        record.seconds |= dict(_lines(worker / "seconds"))
        pairs = call_log.read_files(worker, "pairs")
        for number, key in set(struct.iter_unpack("=II", pairs[: len(pairs) // 8 * 8])):
            name = imports.get(number) or names.get(number)
            if name is not None and key in words:
                used[words[key]].update(users[name] if name.startswith(FIXTURE) else [name])
    files = {name: name.partition(":")[0] for name in used}
    followed = {test for name, tests in used.items() for test in tests if test.startswith(f"{files[name]}::")}
    undone |= record.seconds.keys() - followed
    record.seconds = {test: seconds for test, seconds in record.seconds.items() if test not in undone}
    record.used = {words: tests - undone for words, tests in used.items() if tests - undone}
    return record


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _lines(path: Path) -> Iterator[Any]:
    for line in _text(path).splitlines():
        with suppress(ValueError):  # cut by the end of the process
            yield json.loads(line)


def records(config: Any) -> bool:
    """Return whether pytest was asked to record."""
    return bool(config.option.record_map or config.option.record_lines)


def configure(config: Any) -> None:
    """Begin to record where pytest was asked to: each process that runs tests in a folder of its own."""
    if not records(config):
        return
    if not hasattr(config, "workerinput"):  # that of another run, of which this one is a test, stays as it is
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="dtgpt-calls-")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER]), config.option.record_lines is not None))


def finish(config: Any) -> None:
    """Write the record, in the process that has started the others."""
    if hasattr(config, "workerinput") or not records(config):
        return
    folder = Path(os.environ.pop(FOLDER))
    if config.option.record_lines:
        covered_lines.write(folder, Path(config.option.record_lines))
    if config.option.record_map:
        newer, older = read_workers(folder, head()), load_record(RECORD) or Record()
        newer = older.merge(newer, asks_for_all(config) and config.option.markexpr == "not long")
        newer.save(RECORD)
        print(f"\n{RECORD.relative_to(ROOT)}: {len(newer.seconds)} tests, {len(newer.used)} functions and files")
    shutil.rmtree(folder)


def head() -> str:
    """Return the commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
