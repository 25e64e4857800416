"""Whether a run in fp8 follows the run in bf16: the same seed, weights and batches, and how far the losses are apart.

    python benchmarks/curve_precision.py --model 124m --micro_batch_size 16 --steps 2000 --data.path your_text_document

Each setting of `--settings` is a string of overrides and trains in turn, a whole run each; the first is what the others
are compared with. Rounding alone takes two runs apart by more than many a difference that one wants to see. So each
setting can train several times, with runs that differ in rounding alone (`--roundings 16 8 4`, sizes of micro-batches
of the same steps) or by `--seeds`, and the means are compared, with their standard error. Options it does not know are
overrides of the recipe in every setting.
"""

import argparse
import json
import shlex
import statistics
from pathlib import Path

from train_step import make_recipe

from dtgpt.train.setup import open_trainer
from dtgpt.util.shared.as_loaded import as_loaded

LAST = 100  # steps whose mean loss is compared


def train(args: argparse.Namespace, overrides: list[str]) -> dict:
    """Return the loss of every step, and the validation losses after the last: as the run computes, and in 16
    bits, as a checkpoint of it does."""
    with open_trainer(make_recipe(args, overrides, "single")[0]) as training:
        results = [training.train_step() for _ in range(args.steps)]
        held_out = training.held_out_loss()
        with as_loaded(training):
            loaded = training.held_out_loss()
        assert held_out is not None and loaded is not None
        losses = [training.mean_loss(result) for result in results]
        return {"losses": losses, "held_out": held_out[0], "held_out_loaded": loaded[0]}


def names_of(setting: str, args: argparse.Namespace) -> list[str]:
    """Return the overrides of each run of a setting."""
    sizes = [f" --micro_batch_size {size}" for size in args.roundings] or [""]
    seeds = [f" --seed {seed}" for seed in args.seeds] or [""]
    return [f"{setting}{size}{seed}" for seed in seeds for size in sizes]


def compare(args: argparse.Namespace, overrides: list[str]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    others = names_of(args.settings[0], args)
    for setting in args.settings:
        for name, other in zip(names_of(setting, args), others, strict=True):
            found[name] = train(args, [*overrides, "--steps", str(args.steps), *shlex.split(name)])
            say_run(name, found[name], found[other], args.steps)
    for setting in args.settings:
        say_means(setting, [found[name] for name in names_of(setting, args)], [found[name] for name in others])
    return found


def say_run(name: str, mine: dict, first: dict, steps: int) -> None:
    """Print the losses of a run, and how far they are above those of the first setting's run of the same rounding."""
    loss, loaded = (f"{mine[key]:.4f} ({mine[key] - first[key]:+.4f})" for key in ("held_out", "held_out_loaded"))
    print(f"\n{name}: validation loss {loss}, in 16 bits {loaded}")
    for end in range(steps // 5, steps + 1, steps // 5):
        window = slice(max(end - LAST, 0), end)
        mean, other = (statistics.mean(run["losses"][window]) for run in (mine, first))
        print(f"  steps {window.start:5d} to {end:5d}: mean loss {mean:.4f}, {mean - other:+.4f}", flush=True)


def figure(run: dict, key: str) -> float:
    """Return a validation loss of a run, or for `losses` the mean of the last steps."""
    return statistics.mean(run[key][-LAST:]) if key == "losses" else run[key]


def say_means(setting: str, mine: list[dict], first: list[dict]) -> None:
    """Print means over the runs of a setting, their range, and how far they are above those of the first setting; the
    standard error is that of differences of runs of the same seed and size."""
    print(f"\n{setting}: means of {len(mine)} runs")
    for key in ("losses", "held_out", "held_out_loaded"):
        values, others = ([figure(run, key) for run in runs] for runs in (mine, first))
        apart = [a - b for a, b in zip(values, others, strict=True)]
        error = f", standard error {statistics.stdev(apart) / len(apart) ** 0.5:.4f}" if len(apart) > 1 else ""
        print(
            f"  {f'last {LAST} steps' if key == 'losses' else key:16} {statistics.mean(values):.4f} "
            f"({min(values):.4f} to {max(values):.4f}), {statistics.mean(apart):+.4f}{error}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="124m", help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--settings", nargs="+", default=["--precision bf16", "--precision fp8"])
    parser.add_argument("--roundings", nargs="+", type=int, default=[], help="sizes of micro-batches, a run with each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="a run with each")
    parser.add_argument("--json", type=Path, help="write the losses there")
    args, overrides = parser.parse_known_args()
    args.plans = ["single"]
    found = compare(args, overrides)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
