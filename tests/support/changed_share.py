"""How much `--changed` chooses, and whether what it chooses finds faults.

    python -m tests.support.changed_share commits 100    # the share of the recorded CPU seconds, commit by commit
    python -m tests.support.changed_share faults         # is the test among them that found a planted fault?
    python -m tests.support.changed_share faults drawn.jsonl    # or one of those that `planted_faults.py --drawn` wrote

Without a file, faults are those of `benchmarks/faults.py`, with the tests that benchmarks/notes/planted_faults.md
names.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.changed import Selection, seconds_of
from tests.support.recorded_map import RECORD, ROOT, Record, load_record
from tests.support.source_tree import Tree


def extract(commit: str, folder: str) -> None:
    """Write the files of a commit to a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)


def share_of(commit: str, record: Record) -> tuple[float, int, int]:
    """Return the share of the recorded CPU seconds that a commit chooses, its Python files, and those of them that the
    record does not have: it was made later, after they were moved or removed."""
    with tempfile.TemporaryDirectory() as folder:
        extract(commit, folder)
        tree = Tree(ROOT, f"{commit}^", until=commit, files=Path(folder))
        changes = tree.changes(tree.base)
        selection = Selection(tree, record, changes)
        choice = selection.run()
        files = [path for path in {new or old or "" for old, new in changes} if path.endswith(".py")]
        then = {new: old for old, new in tree.changes(record.commit)}
        known = {words.partition(":")[0] for words in record.used}
        lost = [path for path in files if then.get(path, path) not in known]
        return seconds_of(choice, record) / sum(record.seconds.values()), len(files), len(lost)


def print_shares(count: int, record: Record) -> None:
    commits = subprocess.run(
        ["git", "rev-list", "--no-merges", f"--max-count={count}", record.commit],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    shares = []
    for commit in commits:
        share, files, lost = share_of(commit, record)
        shares.append(share)
        print(f"{commit[:8]} {100 * share:5.1f} %  {files} Python files, {lost} that the record lacks", flush=True)
    print(f"median {100 * median(shares):.1f} %, mean {100 * sum(shares) / len(shares):.1f} % of {len(shares)} commits")


def found_faults(file: Path | None) -> list[tuple[Any, str]]:
    """Return faults that tests have found, each with the test: those of a file, or of the page."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from faults import FAULTS, Fault

    if file is not None:
        results = [json.loads(line) for line in file.read_text().splitlines()]
        return [(Fault(*map(each.get, Fault._fields)), each["found"]) for each in results if "::" in each["found"]]
    page = (ROOT / "benchmarks/notes/planted_faults.md").read_text()
    finders = dict(re.findall(r"(?m)^\| ([^|]+) \| `([^`|]+::[^`]+)`", page))
    return [(fault, f"tests/{finders[fault.name]}") for fault in FAULTS if fault.name in finders]


def print_faults(record: Record, file: Path | None) -> None:
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        extract("HEAD", folder)
        tree = Tree(ROOT, "HEAD", until="HEAD", files=Path(folder))
        for fault, finder in found_faults(file):
            path = Path(folder, fault.path)
            text = path.read_text()
            path.write_text(text.replace(fault.old, fault.new))
            choice = Selection(tree, record, [(fault.path, fault.path)]).run()
            path.write_text(text)
            said = choice.reason(finder) or ("MISSED" if finder in record.seconds else "not recorded")
            kind = "found" if choice.reason(finder) else said
            found[kind] = found.get(kind, 0) + 1
            share = seconds_of(choice, record) / sum(record.seconds.values())
            print(f"{said:14} {100 * share:5.1f} %  {fault.name}: {finder}", flush=True)
    print(found)


def main() -> None:
    record = load_record(RECORD)
    if record is None:
        sys.exit(f"{RECORD} is no record: python -m pytest -n 3 --record-map makes it")
    if sys.argv[1:2] == ["commits"]:
        return print_shares(int(sys.argv[2]), record)
    if sys.argv[1:2] == ["faults"]:
        return print_faults(record, Path(sys.argv[2]) if sys.argv[2:] else None)
    sys.exit(__doc__)


if __name__ == "__main__":
    main()
