"""Whether a run in fp8 follows the run in bf16: the same seed, weights and batches, and how far the losses are apart.

    python benchmarks/curve_precision.py --model 124m --micro_batch_size 16 --steps 2000 --data.path your_text_document

Each setting of `--settings` is a string of overrides and trains in turn, a whole run each; the first is what the others
are compared with. One that differs from it in rounding alone, such as "--precision bf16 --micro_batch_size 8", shows
what rounding does to a curve. Options it does not know are overrides of the recipe in every setting.
"""

import argparse
import json
import shlex
import statistics
from pathlib import Path

from train_step import make_recipe

from dtgpt.train.startup import open_trainer

LAST = 100  # steps whose mean loss is compared


def train(args: argparse.Namespace, overrides: list[str]) -> tuple[list[float], float]:
    """Return the loss of every step, and the held-out loss after the last."""
    with open_trainer(make_recipe(args, overrides, "single")[0]) as training:
        results = [training.train_step() for _ in range(args.steps)]
        held_out = training.held_out_loss()
        assert held_out is not None
        return [training.mean_loss(result) for result in results], held_out[0]


def compare(args: argparse.Namespace, overrides: list[str]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for setting in args.settings:
        losses, held_out = train(args, [*overrides, "--steps", str(args.steps), *shlex.split(setting)])
        found[setting] = {"losses": losses, "held_out": held_out}
        first = found[args.settings[0]]
        print(f"\n{setting}: held-out loss {held_out:.4f}, {held_out - first['held_out']:+.4f}")
        for end in range(args.steps // 5, args.steps + 1, args.steps // 5):
            window = slice(max(end - LAST, 0), end)
            mine, other = (statistics.mean(run["losses"][window]) for run in (found[setting], first))
            print(f"  steps {window.start:5d} to {end:5d}: mean loss {mine:.4f}, {mine - other:+.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="124m", help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--settings", nargs="+", default=["--precision bf16", "--precision fp8"])
    parser.add_argument("--json", type=Path, help="write the losses there")
    args, overrides = parser.parse_known_args()
    args.plans = ["single"]
    found = compare(args, overrides)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
