"""Recompute the table of docs/planning.md: measured steps of measured_steps.json beside those that dtgpt plan predicts.

python benchmarks/predicted_steps.py            # no GPU; --markdown: the table of the page
"""

import argparse
import json
import statistics
from pathlib import Path

from dtgpt.planning.gpus import known_gpu
from dtgpt.planning.step_time import step_time
from dtgpt.train.settle import load_recipe

HERE = Path(__file__).parent
HEADS = ["case", "measured, ms", "predicted, ms", "error"]


def predicted(case: dict) -> tuple[float, float]:
    """Return the measured and the predicted seconds of a step of a case."""
    recipe = load_recipe(HERE.parent / "recipes" / case["recipe"], ["--plan", case["plan"], *case["options"].split()])
    settings, rates = recipe.planned(None), known_gpu(case["gpu"]).rates
    assert rates is not None
    tokens = settings.global_batch_size * settings.seq_length
    measured = case["milliseconds"] / 1e3 if "milliseconds" in case else tokens / case["tokens_per_second"]
    return measured, step_time(settings, rates).total


def name_of(case: dict) -> str:
    words = [case["gpu"], case["recipe"].removesuffix(".py"), case["plan"]]
    options = case["options"].replace("--model.", "").replace("--optimizer.", "").replace("--", "")
    return " ".join(words) + (f": {options}" if options else "")


def errors_of(cases: list[dict]) -> list[float]:
    """Return the relative errors of the cases: positive where a step is predicted too long."""
    return [predicted / measured - 1 for measured, predicted in map(predicted_pair, cases)]


predicted_pair = predicted


def summary(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    within = sum(size <= 0.12 for size in sizes)
    return f"{len(sizes)} cases: median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}, within 12 %: {within}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/planning.md")
    markdown = parser.parse_args().markdown
    cases = json.loads((HERE / "measured_steps.json").read_text())["cases"]
    for gpu, fit in (("H200", True), ("H200", False), ("H100", False)):
        chosen = [case for case in cases if case["gpu"] == gpu and case.get("fit", False) == fit]
        title = f"{gpu}, {'constants come from these' if fit else 'held out'}"
        print(f"\n{title}\n")
        rows = [HEADS, ["---", "---:", "---:", "---:"]] if markdown else [HEADS]
        errors = []
        for case in chosen:
            measured, expected = predicted(case)
            errors.append(expected / measured - 1)
            rows.append([name_of(case), f"{measured * 1e3:,.1f}", f"{expected * 1e3:,.1f}", f"{errors[-1]:+.1%}"])
        for row in rows:
            print(f"| {' | '.join(row)} |" if markdown else f"{row[0]:<110}{row[1]:>14}{row[2]:>15}{row[3]:>9}")
        print(f"\n{summary(errors)}")


if __name__ == "__main__":
    main()
