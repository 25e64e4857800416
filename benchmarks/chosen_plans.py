"""Measure whether `--plan auto` chooses the fastest plan: what it chose for each of 12 recipes beside what else fits.

    python benchmarks/chosen_plans.py RESULTS.jsonl                  # on the GPUs of this machine
    python benchmarks/chosen_plans.py RESULTS.jsonl --part 0 2       # every second recipe, from the first on
    python benchmarks/chosen_plans.py RESULTS.jsonl --table          # measure nothing; rows from the results
    python benchmarks/chosen_plans.py RESULTS.jsonl --device cpu     # a try of this file, with one small recipe

The plans of a recipe are the fastest of each division into dp, cp, tp, pp and ZeRO, as `dtgpt plan --plan auto` lists
them, with micro-batch size and recomputation, as far as their predicted steps take at most `--near` times the first.
Each is measured in processes that stay alive. Each result is appended to RESULTS.jsonl at once; recipes that stand
there are not measured again.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from train_step import RECIPES, timed

from dtgpt.compare.fuzz.pool import Pool, PoolJob
from dtgpt.config.overrides import apply_overrides
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import named_kind, of_kind
from dtgpt.planning.auto import AutoPlan, with_choice
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe

CASES = {
    "cuda": [
        "gpt2_124m.py --global_batch_size 32",
        "gpt2_124m.py --global_batch_size 16 --model.seq_length 4096 --model.dropout 0",
        "gpt2_345m.py --global_batch_size 16",
        "gpt2_345m.py --global_batch_size 64 --model.dropout 0",
        "gpt2_345m.py --global_batch_size 32 --precision fp8 --model.dropout 0",
        "gpt2_345m.py --global_batch_size 8 --precision fp32",
        "gpt2_345m.py --global_batch_size 2 --optimizer.kind muon",
        "gpt2_345m.py --global_batch_size 8 --model.num_layers 48 --model.hidden_size 1600 --model.num_heads 25",
        "llama32_1b.py --global_batch_size 8",
        "llama32_1b.py --global_batch_size 2 --model.seq_length 16384",
        "qwen3_0_6b.py --global_batch_size 16 --model.seq_length 2048",
        "qwen3_0_6b.py --global_batch_size 4 --precision fp8",
    ],
    "cpu": ["gpt2_tiny.py --global_batch_size 8 --model.num_layers 2 --device cpu --precision fp32"],
}
DATA = ["--data.tokenizer", "bytes", "--data.held_out", "0"]
WARM_UP, STEPS = 6, 8
LIMIT = 420.0  # seconds of a recipe


class Plan(NamedTuple):
    """A plan of a recipe, as it was chosen. predicted: seconds of a step."""

    name: str
    predicted: float
    recipe: Recipe


def plans_of(words: str, world: int, near: float) -> list[Plan]:
    """Return the plans of a recipe to be measured, that of `--plan auto` first."""
    file, *options = words.split()
    recipe = of_kind(load_recipe(RECIPES / file, []), named_kind(options))
    recipe = apply_overrides(replace(recipe, plan="auto"), [*options, *DATA])
    ranking = AutoPlan(recipe=recipe, world=world).ranking(most=99)
    found = []
    for candidate in ranking.fitting:
        if candidate.seconds <= near * ranking.best.seconds:
            chosen = with_choice(recipe, candidate)
            plan = candidate.settings.plan.name
            name = f"{plan} mb {chosen.micro_batch_size} recompute {chosen.recompute}"
            found.append(Plan(name, candidate.seconds, replace(chosen, plan=plan)))
    return found


def measure(plans: Sequence[Plan]) -> list[tuple[str, float, float]]:
    """Return (name, predicted, measured) of each plan, in every process of all of them."""
    found = []
    for plan in plans:
        with open_trainer(plan.recipe) as trainer:
            device = trainer.mesh.device
            for _ in range(WARM_UP):
                trainer.train_step()
            times = timed(trainer.train_step, STEPS, device)
            seconds = max(trainer.mesh.gather(statistics.median(times)))
        found.append((plan.name, plan.predicted, seconds))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def run(args: argparse.Namespace) -> None:
    known = {result["recipe"] for result in read(args.results)}
    first, step = args.part
    with Pool(args.device) as pool:
        for words in CASES[args.device][first::step]:
            if words in known:
                continue
            plans = plans_of(words, args.world, args.near)
            (answers,) = pool.run([PoolJob(args.world, measure, (plans,))], LIMIT)
            failures = [answer.refusal or answer.failure for answer in answers if answer.refusal or answer.failure]
            if failures:
                print(f"{words}: {failures[0]}", flush=True)
                continue
            with args.results.open("a") as file:
                file.write(json.dumps({"recipe": words, "plans": answers[0].value}) + "\n")
            print(rows([read(args.results)[-1]]), flush=True)


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rows(results: list[dict]) -> str:
    """Return a row for each recipe: the plan that was chosen, the fastest, and their measured and predicted steps."""
    lines = []
    for result in results:
        (chosen, predicted, seconds), *_ = plans = result["plans"]
        name, expected, fastest = min(plans, key=lambda plan: plan[2])
        times = f"{seconds * 1e3:,.1f} ({predicted * 1e3:,.1f}) | {name} | {fastest * 1e3:,.1f} ({expected * 1e3:,.1f})"
        lines.append(f"| {result['recipe']} | {chosen} | {times} | {len(plans)} | {seconds / fastest - 1:+.1%} |")
    return "\n".join(lines)


def table(results: list[dict]) -> str:
    heads = "| recipe | chosen | ms: measured (predicted) | fastest | ms | measured plans | slower by |"
    losses = [plans[0][2] / min(plan[2] for plan in plans) - 1 for plans in (result["plans"] for result in results)]
    summary = f"{len(losses)} recipes: median {statistics.median(losses):.1%}, largest {max(losses):.1%}"
    return "\n".join([heads, "|---|---|---|---|---|---:|---:|", rows(results), "", summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", default="cuda", choices=list(CASES))
    parser.add_argument("--world", type=int, default=2, help="processes of each plan")
    parser.add_argument("--near", type=float, default=1.25, help="leave out plans that are predicted to be slower")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "STEP"), help="some recipes alone"
    )
    parser.add_argument("--table", action="store_true", help="measure nothing; print the results")
    args = parser.parse_args()
    if not args.table:
        run(args)
    if found := read(args.results):
        print(table(found))


if __name__ == "__main__":
    main()
