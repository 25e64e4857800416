"""Faults of one line, planted on purpose in a copy of the sources: which tests find them?

    python benchmarks/planted_faults.py results.jsonl                # all that are not in the file yet: an hour
    python benchmarks/planted_faults.py results.jsonl --only ramp    # whose names contain the word
    python benchmarks/planted_faults.py results.jsonl --table        # as in benchmarks/notes/planted_faults.md
    python benchmarks/planted_faults.py gate.jsonl --gate            # does dtgpt compare name the module? 15 minutes

For each fault run the quick tests (`pytest -m quick`) up to the first that fails, and random cases (`dtgpt compare
--random`) up to the first that is wrong. Where neither finds it, run the whole suite.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS, Fault
from located_faults import LOCATED, LocatedFault

ROOT = Path(__file__).resolve().parents[1]
SEED, CASES = 2026, 20
LIST = "tests/promises/test_planted_faults.py"  # which finds all of them: it looks for the lines


class Found(NamedTuple):
    """What found a fault: the name of a test or the number of a case, empty where nothing did."""

    fault: str
    quick: str
    random: str
    whole: str = ""


def copy_sources(folder: Path) -> None:
    """Copy the files that git knows to `folder`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


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


def first_failure(folder: Path, mark: str) -> str:
    """Return the first test of a mark that fails, empty where none does."""
    options = ["tests", "-q", "-x", "-n", "2", "-m", mark, "-p", "no:cacheprovider", f"--ignore={LIST}"]
    done = run(["-m", "pytest", *options], folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not lines:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else ""


def first_wrong_case(folder: Path) -> str:
    """Return the first random case that is wrong, empty where none is."""
    done = run([str(Path(__file__).relative_to(ROOT)), "-", "--cases"], folder)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return done.stdout.strip()


def print_first_wrong_case() -> None:
    """Run the random cases of this tree and print the first that is wrong."""
    from dtgpt.compare.fuzz.case import Setting, plain, write_text
    from dtgpt.compare.fuzz.drawing import draw_case
    from dtgpt.compare.fuzz.pool import Pool
    from dtgpt.compare.fuzz.run import RANKS_ON_CPU, Runner
    from dtgpt.config.recipe_file import call_recipe, load_module

    with tempfile.TemporaryDirectory() as folder, Pool("cpu") as pool:
        recipe = call_recipe(load_module(ROOT / "recipes" / "gpt2_tiny.py").recipe)
        base = plain(replace(recipe, device="cpu"))
        runner = Runner(Setting(base, {}, write_text(Path(folder) / "documents.jsonl")), pool)
        for index in range(CASES):
            outcome = runner.run(draw_case(SEED, index, RANKS_ON_CPU))
            if outcome.is_bad:
                print(f"case {index}: {outcome.sentence}")
                return


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
            copy_sources(folder)
            for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=-", "-c", "user.email=-", "commit", "-qm-"]):
                subprocess.run(["git", *words], cwd=folder, check=True)
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


def table(results: list[Found]) -> str:
    """Return the results as a table of Markdown."""
    rows = ["| fault | quick tests | random cases | whole suite |", "|---|---|---|---|"]
    for found in results:
        whole = found.whole or ("-" if not (found.quick or found.random) else "")
        rows.append(f"| {found.fault} | {found.quick or '-'} | {found.random or '-'} | {whole} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--only", default="", help="plant faults whose names contain this")
    parser.add_argument("--table", action="store_true", help="print the table of the results")
    parser.add_argument("--gate", action="store_true", help="plant what dtgpt compare is to locate")
    parser.add_argument("--cases", action="store_true", help="run the random cases of this tree, without a fault")
    args = parser.parse_args()
    if args.gate and args.table:
        return print(located_table(Path(args.results)))
    if args.gate:
        return locate_faults(Path(args.results), args.only)
    if args.cases:
        return print_first_wrong_case()
    file = Path(args.results)
    results = [Found(*json.loads(line).values()) for line in file.read_text().splitlines()] if file.exists() else []
    if args.table:
        return print(table(results))
    known = {found.fault for found in results}
    for fault in (each for each in FAULTS if args.only in each.name and each.name not in known):
        with tempfile.TemporaryDirectory(prefix="dtgpt-fault-") as folder:
            copy_sources(Path(folder))
            plant(fault, Path(folder))
            quick, random = first_failure(Path(folder), "quick"), first_wrong_case(Path(folder))
            whole = "" if quick or random else first_failure(Path(folder), "not long")
        found = Found(fault.name, quick, random, whole)
        print(json.dumps(found._asdict()), flush=True)
        with file.open("a") as output:
            output.write(json.dumps(found._asdict()) + "\n")


if __name__ == "__main__":
    main()
