"""A recorded run says which test executed which function, in forks, pools and programs; CPU seconds count them too."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dtgpt.util.shared.environment import child_environment
from tests.support import call_log, covered_lines, cpu_seconds
from tests.support.budgets import REFERENCE
from tests.support.recorded_map import load_record, read_workers

SUPPORT = Path(__file__).parents[1] / "support"
# They need no dtgpt.
OWN = "__init__ budgets call_log changed covered_lines cpu_seconds recorded_map source_tree source_units"
CONFTEST = """
import pytest
from tests.support import changed, cpu_seconds, recorded_map

def pytest_addoption(parser):
    parser.addoption("--changed", nargs="?", const="")
    parser.addoption("--cpu-seconds")
    parser.addoption("--record-lines")
    parser.addoption("--record-map", action="store_true")

def pytest_configure(config):
    for part in (changed, cpu_seconds, recorded_map):
        part.configure(config)

def pytest_unconfigure(config):
    for part in (changed, cpu_seconds, recorded_map):
        part.finish(config)

def pytest_report_header(config):
    return config.stash[changed.KEY].lines if config.option.changed is not None else []

def pytest_collection_modifyitems(config, items):
    changed.deselect(config, items)

@pytest.fixture(scope="session")
def shared():
    from dtgpt.sums import share
    return share()
"""
SUMS = """
def add(a, b): return a + b
def share(): return 1
def forked(): return 2
def pooled():
    kind = 3
    if not kind:
        return 0
    return kind
def started(): return 4
def later(): return 5
def made(): return 6
def printed(): return 8
MADE = made()
"""
SANDBOX = """
import resource
def inside():
    number = 7
    return number
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    print(inside())
"""
TESTS = """
import multiprocessing, os, subprocess, sys, threading
from pathlib import Path
from dtgpt import sums

PAGE = Path(__file__).parents[1].joinpath("page.md").read_text()

def test_a_depth():
    def deeper(): deeper()
    try: deeper()
    except RecursionError: pass
def test_add(): assert sums.add(1, 2) == 3
def test_skipped():
    sums.add(1, 2)
    import pytest
    pytest.skip("as where a package is missing")
def test_first(shared): assert shared == 1
def test_second(shared): assert shared == 1
def test_thread():
    thread = threading.Thread(target=sums.later)
    thread.start()
    thread.join()
def test_fork():
    child = os.fork()
    if not child:
        sums.forked()
        os._exit(0)
    os.waitpid(child, 0)
def test_pool():
    process = multiprocessing.get_context("forkserver").Process(target=sums.pooled)
    process.start()
    process.join()
    assert process.exitcode == 0
def test_program(): subprocess.run([sys.executable, "-c", "from dtgpt import sums; sums.started()"], check=True)
def test_alone(): subprocess.run([sys.executable, "-I", "-c", ""], check=True)
def test_limits():
    file = Path(sums.__file__).with_name("sandbox.py")
    assert subprocess.run([sys.executable, file], check=True, capture_output=True).stdout == b"7\\n"
def test_without_streams():
    write = "for n in 1, 2:\\n try: os.write(n, b'a')\\n except OSError: printed()"
    code = f"import os\\nfrom dtgpt.sums import printed\\n{write}"
    subprocess.run(['sh', '-c', '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
def test_read(): assert Path(__file__).parents[1].joinpath("recipes", "tiny.txt").read_text()
"""
FILES = {
    "dtgpt/__init__.py": "", "dtgpt/sums.py": SUMS, "dtgpt/sandbox.py": SANDBOX, "tests/__init__.py": "",
    "tests/conftest.py": CONFTEST, "tests/test_sums.py": TESTS, "recipes/tiny.txt": "a", "page.md": "b",
    "pytest.ini": "[pytest]\ntestpaths = tests\n",
}  # fmt: skip


def pytest_of(folder: Path, *words: str) -> str:
    environment = child_environment() | {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow(8)
@pytest.mark.parametrize("with_lines", [True, False])
def test_each_process_of_a_test_is_recorded_and_a_change_runs_what_executed_it(tmp_path, with_lines):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "support").mkdir()
    for name in OWN.split():
        (tmp_path / "tests" / "support" / f"{name}.py").write_bytes((SUPPORT / f"{name}.py").read_bytes())
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=-", "-c", "user.email=-", "commit", "-qm-"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    lines = ["--record-lines=lines.json"] if with_lines else []  # else, from Python 3.12 on, without a trace function
    pytest_of(tmp_path, "-n", "2", "--record-map", "--cpu-seconds=seconds.txt", *lines)
    used = load_record(tmp_path / "tests" / "recorded_map.xz").used

    def tests_of(words: str) -> set[str]:
        return {test.removeprefix("tests/test_sums.py::test_") for test in used[words]}

    wanted = {"add": "add", "forked": "fork", "pooled": "pool", "started": "program", "later": "thread"}
    wanted["printed"] = "without_streams"
    assert {name: tests_of(f"dtgpt/sums.py:{name}") for name in wanted} == {k: {v} for k, v in wanted.items()}
    assert tests_of("dtgpt/sandbox.py:inside") == {"limits"}
    assert tests_of("dtgpt/sums.py:share") == {"first", "second"}
    assert tests_of("dtgpt/sums.py:made") == {"import dtgpt/sums.py"}
    assert tests_of("read recipes/tiny.txt") == {"read"} and tests_of("unseen") == {"alone"}
    assert tests_of("read page.md") == {"import tests/test_sums.py"}
    assert not any("skipped" in test for tests in used.values() for test in tests)
    seconds = (tmp_path / "seconds.txt").read_text()
    assert re.search(r"(?m)^ +\d+\.\d  tests/test_sums.py$", seconds), seconds

    path, text = tmp_path / "dtgpt" / "sums.py", SUMS.splitlines()
    if with_lines:
        ran = covered_lines.read(str(tmp_path / "lines.json"))
        inner = {text.index(f"    {line}") + 1 for line in ("kind = 3", "if not kind:", "return kind")}
        assert ran == {"dtgpt/sandbox.py": {4, 5}, "dtgpt/sums.py": inner}
        assert covered_lines.lines_of(path) == {*inner, max(inner) - 1}

    path.write_text(SUMS.replace("kind = 3", "kind = 4"))
    said = pytest_of(tmp_path, "-n", "2", "--changed", "-v")
    assert set(re.findall(r"PASSED tests/test_sums.py::test_(\w+)", said)) == {"pool", "alone"}
    assert "changed since" in said and "by the record of" in said and "chosen: 2 of 12 recorded tests" in said


def test_a_test_that_was_not_followed_is_not_in_the_record(tmp_path):
    (tmp_path / "worker-1").mkdir()
    log = call_log.CallLog(str(tmp_path / "worker-1"))
    for number, name in enumerate(["tests/test_a.py::test_one", "tests/test_a.py::test_two"], 1):
        for file, line in ("names", [number, name]), ("seconds", [name, 0.1]), ("fixtures", [name, []]):
            with Path(log.folder, file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        log.note(number, "dtgpt/sums.py:add")
    log.note(1, "tests/test_a.py:test_one")
    record = read_workers(tmp_path, "")
    assert record.seconds == {"tests/test_a.py::test_one": 0.1}
    assert record.used["dtgpt/sums.py:add"] == {"tests/test_a.py::test_one"}


def test_a_file_that_loses_lines_is_named(tmp_path):
    file = "dtgpt/config/plan.py"
    lines = sorted(covered_lines.lines_of(covered_lines.ROOT / file))
    few = int(len(lines) * covered_lines.LIMIT / 100)
    assert covered_lines.losses({file: set(lines)}, {file: set(lines[few:])}) == []
    (line,) = covered_lines.losses({file: set(lines)}, {file: set(lines[few + 1 :])})
    assert line.startswith(f"{file}: {few + 1} of {len(lines)} lines run no longer: {lines[0]}, ")


def test_what_a_process_calls_after_a_test_has_begun_belongs_to_this_test(tmp_path):
    log = call_log.CallLog(str(tmp_path))
    for number in (7, 0, 8):
        log.begin(number)
        log.note(number, "dtgpt/a.py:f")
    pairs = list(struct.iter_unpack("=II", (tmp_path / "pairs").read_bytes()))
    assert pairs == [(number, call_log.checksum("dtgpt/a.py:f")) for number in (7, 8)]  # 0: between tests
    assert (tmp_path / "words").read_text() == "dtgpt/a.py:f\n"


SEEK = """
def seek(numbers):
    for number in numbers:
        if number < 0:
            return number
    return 0
"""


def test_a_line_that_runs_after_many_others_is_found_in_a_later_test(tmp_path):
    (tmp_path / "dtgpt").mkdir()
    (tmp_path / "dtgpt" / "much.py").write_text(SEEK)
    folder = tmp_path / "log"
    folder.mkdir()
    call_log.write_hook(str(folder), f"{tmp_path}/", with_lines=True)
    (folder / "number").write_bytes(struct.pack("=I", 1))
    (tmp_path / "program.py").write_text(f"""
import struct
from dtgpt.much import seek
seek(range({call_log.VAIN}))
open({str(folder / "number")!r}, "r+b").write(struct.pack("=I", 2))
seek([-1])
""")
    path = f"{folder}:{tmp_path}"
    subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=child_environment() | {"PYTHONPATH": path}, check=True
    )
    lines = call_log.read_lines(folder, "lines")
    assert sorted(lines) == [f"dtgpt/much.py:{number}" for number in (3, 4, 5)]  # the first test has left it before 6


ORPHANS = """
import os, time
from tests.support.cpu_seconds import clock

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

before = clock().now()
child = os.fork()
if not child:
    if not os.fork():
        work(0.3)
        os._exit(0)
    work(0.3)
    os._exit(0)  # before its own child ends
os.waitpid(child, 0)
while clock().now() - before < 0.55: time.sleep(0.05)
def zombies():
    return [line for line in os.popen(f"ps -o stat= --ppid {os.getpid()}").read().split() if line.startswith("Z")]

end = time.monotonic() + 20
while (left := zombies()) and time.monotonic() < end: time.sleep(0.1)
assert not left, left
assert clock().now() - before < 0.9
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_seconds_of_processes_whose_parent_has_ended_count_and_none_stays():
    subprocess.run([sys.executable, "-c", ORPHANS], env=child_environment(), check=True, timeout=60)


def test_seconds_are_told_by_file_with_the_loop():
    found = [("loop", REFERENCE / 2), ("a.py", 1.0), ("b.py", 4.0), ("a.py", 2.0), ("all", 8.0), ("all", 1.0)]
    lines = cpu_seconds.report(found)
    assert lines[0] == "7.0 CPU seconds of tests, and 2.0 between them (imports, collection)"
    assert lines[1].endswith(": 14.0") and lines[2:] == ["     4.0  b.py", "     3.0  a.py"]
