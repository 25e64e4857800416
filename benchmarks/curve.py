"""Whether a captured step follows the uncaptured one: two runs of the same key, and how far their losses are apart.

    python benchmarks/curve.py --model 124m --micro_batch_size 8 --steps 200 --dropout 0.1

A second uncaptured run stands beside them: sums whose order is not fixed make it differ too, and that is the rounding
to compare with. Options it does not know are overrides of the recipe.
"""

import argparse

from train_step import make_recipe

from dtgpt.config.execution import choose_device
from dtgpt.train.startup import open_trainer


def losses(args: argparse.Namespace, overrides: list[str]) -> list[float]:
    with open_trainer(make_recipe(args, overrides, "single")[0]) as training:
        results = [training.train_step() for _ in range(args.steps)]
        return [training.mean_loss(result) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="124m", help="as train_step.py takes it")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    args, overrides = parser.parse_known_args()
    args.plans = ["single"]
    plain = [*overrides, "--graph", "off", "--compile", "off"]
    cuda = choose_device(make_recipe(args, overrides, "single")[0].device).type == "cuda"
    captured, first, second = losses(args, overrides if cuda else plain), losses(args, plain), losses(args, plain)
    for name, other in (("captured", captured), ("uncaptured again", second)):
        apart = [abs(a - b) / b for a, b in zip(other, first, strict=True)]
        print(f"{name:<18}against uncaptured: largest {max(apart):.1e}, mean {sum(apart) / len(apart):.1e} of the loss")
    print(f"losses {first[0]:.4f} -> {first[-1]:.4f}, captured {captured[-1]:.4f}")


if __name__ == "__main__":
    main()
