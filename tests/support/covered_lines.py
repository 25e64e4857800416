"""The lines of functions of `dtgpt/` that tests run, in all their processes. `pytest --record-lines=FILE` writes them.

    python -m tests.support.covered_lines before.json after.json    # files that lost more than 2 % of their lines
    python -m tests.support.covered_lines before.json               # the share of each file's lines

A run of some tests writes what they run: files of several runs can be named together as `one.json+two.json`.
"""

import json
import sys
from pathlib import Path
from types import CodeType

from tests.support import call_log

HELP = "write which lines of functions of dtgpt/ the tests run, in all of their processes: 1.8 times the time of a run"
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2.0  # percent of the lines of a file


def write(folder: Path, file: Path) -> None:
    """Write what the workers of a run have found: `{file: its lines that ran}`."""
    found: dict[str, set[int]] = {}
    for worker in folder.glob("worker-*"):
        for line in call_log.read_lines(worker, "lines"):
            name, _, number = line.rpartition(":")
            found.setdefault(name, set()).add(int(number))
    file.write_text(json.dumps({name: sorted(numbers) for name, numbers in sorted(found.items())}))


def read(files: str) -> dict[str, set[int]]:
    """Return the lines of one file, or of several that a plus joins."""
    found: dict[str, set[int]] = {}
    for file in files.split("+"):
        for name, numbers in json.loads(Path(file).read_text()).items():
            found.setdefault(name, set()).update(numbers)
    return found


def lines_of(path: Path) -> set[int]:
    """Return the lines of the functions of a file that Python can run."""
    found, waiting = set[int](), [compile(path.read_text(), str(path), "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        if code.co_name != "<module>":
            found |= call_log.lines_of(code)
    return found


def losses(before: dict[str, set[int]], after: dict[str, set[int]]) -> list[str]:
    """Return a line for each file of which more than LIMIT percent of the lines that ran before do not run now."""
    lines = []
    for name, numbers in sorted(before.items()):
        lost, all_lines = sorted(numbers - after.get(name, set())), len(lines_of(ROOT / name)) or 1
        if 100 * len(lost) > LIMIT * all_lines:
            lines.append(f"{name}: {len(lost)} of {all_lines} lines run no longer: {', '.join(map(str, lost))}")
    return lines


def main() -> None:
    if len(sys.argv) == 3:
        lost = losses(read(sys.argv[1]), read(sys.argv[2]))
        print("\n".join(lost) or f"no file has lost more than {LIMIT:g} % of its lines")
        sys.exit(bool(lost))
    total = ran = 0
    for name, numbers in read(sys.argv[1]).items():
        own = lines_of(ROOT / name)
        total, ran = total + len(own), ran + len(own & numbers)
        print(f"{100 * len(own & numbers) / (len(own) or 1):5.1f} %  {name}")
    print(f"{100 * ran / total:5.1f} %  of {total} lines in files of which a test runs some")


if __name__ == "__main__":
    main()
