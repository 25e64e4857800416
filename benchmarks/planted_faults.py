"""Faults of one line, planted on purpose in a clone of HEAD: which tests find them?

    python benchmarks/planted_faults.py results.jsonl                # all that are not in the file yet: an hour
    python benchmarks/planted_faults.py results.jsonl --only ramp    # whose names contain the word
    python benchmarks/planted_faults.py drawn.jsonl --drawn 50       # and 50 changes of functions, drawn by --seed
    python benchmarks/planted_faults.py after.jsonl --again drawn.jsonl    # those of a file that were found, again
    python benchmarks/planted_faults.py results.jsonl --table        # what was found, as a table of Markdown
    python benchmarks/planted_faults.py gate.jsonl --gate            # does dtgpt compare name the module? 15 minutes

Each fault is a change, and runs the tests that the change concerns: `pytest --changed=HEAD` up to the first that fails,
the quickest files first. So the record of tests has to be there (`pytest -n 3 --record-map`). Before them, the test
that found the fault the last time is asked alone: that of `benchmarks/notes/planted_faults.md`, or of `--again`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from drawn_faults import draw_faults
from faults import FAULTS, Fault
from located_faults import LOCATED, LocatedFault

ROOT = Path(__file__).resolve().parents[1]
LIST = "tests/promises/test_planted_faults.py"  # which finds all of them: it looks for the lines
LIMIT = 900  # seconds of the tests of a fault
HANGS = "the tests did not end"
CRASHES = "pytest ended"


def clone(folder: Path) -> None:
    """Clone HEAD to `folder`, with the record of tests of this tree."""
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
    record = Path("tests", "recorded_map.xz")
    if (ROOT / record).exists():
        (folder / record).write_bytes((ROOT / record).read_bytes())


def plant(fault: Fault, folder: Path) -> None:
    """Change the line in a copy of the sources. Raises ValueError where it is not there once."""
    path = folder / fault.path
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.path} has the line of '{fault.name}' {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new))


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def first_failure(folder: Path, found: str) -> str:
    """Return the first test that fails of those that a change concerns, empty where none does. found: the test that
    found the fault the last time, which is asked alone before all others, or empty."""
    if found and "::" in (again := failure_of(folder, [found])):
        return again
    return failure_of(folder, ["-n", "2", "--changed=HEAD", f"--ignore={LIST}"])


def failure_of(folder: Path, asked: list[str]) -> str:
    """Return the first of the tests asked for that fails, why pytest ended otherwise, or an empty string."""
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *asked]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = program.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            return HANGS
        output.seek(0)
        lines = output.read().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        return failed[0].split(" - ")[0].split(" ", 1)[1]
    return "" if status in (0, 5) else f"{CRASHES}: {' '.join(lines[-3:])[-300:]}"  # 5: no test was chosen


def first_fault(located: LocatedFault, folder: Path) -> dict[str, str]:
    """Return what `dtgpt compare` names in a tree in which the fault is planted: the code before it is the commit HEAD
    of the tree."""
    file = folder / "gate.json"
    words = ["compare", "recipes/gpt2_tiny.py", *located.words.split(), "--json", str(file)]
    words += [] if "--steps" in words else ["--steps", "1"]
    small = ["--device", "cpu", "--micro_batch_size", "4", "--global_batch_size", "16", "--model.seq_length", "32"]
    done = run(["-m", "dtgpt", *words, *small], folder)
    if done.returncode not in (0, 1):
        return {"module": "", "finding": (done.stdout + done.stderr).strip()[-300:]}
    result = json.loads(file.read_text())
    found = [result["reference"], *result["runs"].values()]
    faults = [each["first_fault"] for each in found if each["first_fault"] is not None]
    if not faults:
        return {"module": "", "finding": "; ".join(problem for each in found for problem in each["problems"])}
    finding = "{kind} {tensor}, {difference:.1e}".format(**faults[0] | {"difference": float(faults[0]["difference"])})
    return {"module": faults[0]["module"], "finding": finding}


def locate_faults(file: Path, only: str) -> None:
    """Plant each fault of `LOCATED` that is not in the file yet, and write what the gate names."""
    known = {json.loads(line)["fault"] for line in file.read_text().splitlines()} if file.exists() else set()
    for located in LOCATED:
        name = located.fault.name
        if name in known or only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="dtgpt-fault-") as temporary:
            folder = Path(temporary)
            clone(folder)
            plant(located.fault, folder)
            found = {"fault": name, "wanted": located.module, **first_fault(located, folder)}
        print(json.dumps(found), flush=True)
        with file.open("a") as output:
            output.write(json.dumps(found) + "\n")


def located_table(file: Path) -> str:
    """Return what the gate has named as a table of Markdown."""
    words = {located.fault.name: located.words for located in LOCATED}
    rows = [
        "| fault | `dtgpt compare` with | named module | located | first tensor with a fault |",
        "|---|---|---|---|---|",
    ]
    for found in map(json.loads, file.read_text().splitlines()):
        right = "yes" if found["module"] == found["wanted"] else f"no: `{found['wanted']}`"
        name = found["fault"]
        rows.append(f"| {name} | `{words[name]}` | `{found['module']}` | {right} | {found['finding']} |")
    return "\n".join(rows)


def table(results: list[dict]) -> str:
    """Return the results as a table of Markdown."""
    rows = ["| fault | the test that finds it first |", "|---|---|"]
    for found in results:
        test = found["found"].removeprefix("tests/")
        rows.append(f"| {found['name']} | {f'`{test}`' if '::' in test else test or '-'} |")
    return "\n".join(rows)


def read_results(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def found_before(file: Path | None) -> dict[str, str]:
    """Return the tests that found faults the last time, by the names of the faults."""
    sys.path.insert(0, str(ROOT))
    from tests.support.changed_share import found_faults

    return {fault.name: test for fault, test in found_faults(file)}


def plant_each(faults: Iterable[Fault], file: Path, before: dict[str, str]) -> None:
    """Plant each fault that is not in the file yet, and write which test has found it. before: the tests that found
    them the last time, by the names of the faults."""
    known = {found["name"] for found in read_results(file)}
    for fault in (each for each in faults if each.name not in known):
        with tempfile.TemporaryDirectory(prefix="dtgpt-fault-", ignore_cleanup_errors=True) as folder:
            clone(Path(folder))
            plant(fault, Path(folder))
            result = fault._asdict() | {"found": first_failure(Path(folder), before.get(fault.name, ""))}
        print(f"{fault.name}: {result['found'] or 'found by none'}", flush=True)
        with file.open("a") as output:
            output.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="plant faults whose names contain this")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="draw N faults in place of those of faults.py"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--again", type=Path, metavar="FILE", help="plant what was found according to this file")
    parser.add_argument("--table", action="store_true", help="print the table of the results")
    parser.add_argument("--gate", action="store_true", help="plant what dtgpt compare is to locate")
    args = parser.parse_args()
    if args.gate:
        return print(located_table(args.results)) if args.table else locate_faults(args.results, args.only)
    if args.table:
        return print(table(read_results(args.results)))
    faults: Iterable[Fault] = FAULTS
    if args.drawn:
        faults = draw_faults(args.drawn, args.seed)
    if args.again:
        faults = [Fault(*map(each.get, Fault._fields)) for each in read_results(args.again) if each["found"]]
    plant_each([fault for fault in faults if args.only in fault.name], args.results, found_before(args.again))


if __name__ == "__main__":
    main()
