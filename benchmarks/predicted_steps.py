"""Recompute the table of docs/planning.md, case by case: steps of measured_steps.json, and what dtgpt plan predicts.

python benchmarks/predicted_steps.py            # no GPU
"""

import argparse
import json
import statistics
from pathlib import Path

from dtgpt.config.recipe import Recipe
from dtgpt.planning.gpus import known_gpu
from dtgpt.planning.step_time import step_time
from dtgpt.train.start import load_recipe

HERE = Path(__file__).parent
HEADS = "| case | measured, ms | predicted, ms | error | source |\n|---|---:|---:|---:|---|"


def recipe_of(case: dict) -> Recipe:
    return load_recipe(HERE.parent / "recipes" / case["recipe"], ["--plan", case["plan"], *case["options"].split()])


def predicted(case: dict) -> tuple[float, float]:
    """Return the measured and the predicted seconds of a step of a case."""
    settings, rates = recipe_of(case).planned(None), known_gpu(case["gpu"]).rates
    assert rates is not None
    tokens = settings.global_batch_size * settings.seq_length
    measured = case["milliseconds"] / 1e3 if "milliseconds" in case else tokens / case["tokens_per_second"]
    return measured, step_time(settings, rates).total


def name_of(case: dict) -> str:
    words = [case["recipe"].removesuffix(".py"), case["plan"]]
    options = case["options"].replace("--model.", "").replace("--optimizer.", "").replace("--", "")
    for long, short in (("micro_batch_size", "mb"), ("global_batch_size", "batch"), ("precision ", "")):
        options = options.replace(long, short)
    return " ".join(words) + (f": {options}" if options else "")


def row(case: dict, measured: float, expected: float) -> str:
    """Return the row of a case."""
    error = f"{expected / measured - 1:+.1%}"
    return f"| {name_of(case)} | {measured * 1e3:,.1f} | {expected * 1e3:,.1f} | {error} | {case['source']} |"


def summary(gpu: str, fit: bool, errors: list[float]) -> str:
    """Return the row of docs/planning.md for the cases of a GPU that gave constants, or for its others."""
    sizes = [abs(error) for error in errors]
    which = "used to fit the rates" if fit else "not used to fit them"
    return f"| {gpu}, {which} | {len(sizes)} | {statistics.median(sizes):.1%} | {max(sizes):.1%} |".replace("%", " %")


def published(cases: list[dict]) -> None:
    """Print what others published beside what is predicted, in tokens/s per GPU."""
    for case in cases:
        recipe = load_recipe(
            HERE.parent / "recipes" / case["recipe"], ["--plan", case["plan"], *case["options"].split()]
        )
        settings, rates = recipe.planned(case["world"]), known_gpu(case["gpu"]).rates
        assert rates is not None
        tokens = settings.global_batch_size * settings.seq_length / case["world"]
        expected, seen = tokens / step_time(settings, rates).total, case["tokens_per_gpu"]
        named = f"{case['source']}: {case['world']} {case['gpu']}, {name_of(case)}"
        print(f"| {named} | {seen:,.0f} | {expected:,.0f} | {expected / seen:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--published", action="store_true", help="steps of other libraries alone")
    recorded = json.loads((HERE / "measured_steps.json").read_text())
    if parser.parse_args().published:
        return published(recorded["published"])
    cases = recorded["cases"]
    for gpu, fit in (("H200", True), ("H200", False), ("H100", False)):
        print(f"\n{gpu}, {'constants come from these' if fit else 'held out'}\n\n{HEADS}")
        errors = []
        for case in cases:
            if case["gpu"] == gpu and case.get("fit", False) == fit:
                measured, expected = predicted(case)
                errors.append(expected / measured - 1)
                print(row(case, measured, expected))
        print(f"\n{summary(gpu, fit, errors)}")


if __name__ == "__main__":
    main()
