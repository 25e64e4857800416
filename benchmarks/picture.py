"""Draw README's picture: loss curves of one recipe under several plans, and our training rate beside another one.

    python benchmarks/picture.py docs/curves.png --runs single=runs/a-001 dp2=runs/a-002 tp2_sp=runs/a-003 \\
        --rates "nanoGPT, torch.compile=188200" dtgpt=215900 --rates-title "345M, bf16, one H200"

The first run is the reference of the lower curves: how far the loss of each other plan is from it, in every record.
"""

import argparse
from itertools import cycle
from pathlib import Path

from dtgpt.run.plot import import_pyplot
from dtgpt.run.sinks import read_records

WIDTHS = (6.0, 4.5, 3.2, 2.0, 1.0)  # a thinner line on a thicker one: all of them are seen


def losses(run: Path) -> dict[int, float]:
    """Return the training loss by step."""
    return {record["step"]: record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record}


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=pair, nargs="+", required=True, help="LABEL=RUN")
    parser.add_argument("--runs-title", default="Loss under each plan")
    parser.add_argument("--rates", type=pair, nargs="+", required=True, help="LABEL=TOKENS_PER_SECOND")
    parser.add_argument("--rates-title", default="Training rate")
    args = parser.parse_args()
    curves = {label: losses(Path(run)) for label, run in args.runs}
    reference = next(iter(curves.values()))

    pyplot = import_pyplot()
    figure, axes = pyplot.subplot_mosaic(
        [["loss", "rate"], ["difference", "rate"]], figsize=(10, 4.6), layout="constrained",
        height_ratios=[3, 1], width_ratios=[2.4, 1],
    )  # fmt: skip
    for (label, curve), width in zip(curves.items(), cycle(WIDTHS)):
        (line,) = axes["loss"].plot(list(curve), list(curve.values()), linewidth=width, label=label)
        if curve is not reference:
            apart = [abs(curve[step] - loss) / loss for step, loss in reference.items() if step in curve]
            steps = [step for step in reference if step in curve]
            axes["difference"].plot(steps, apart, ".", markersize=3, color=line.get_color())
    axes["loss"].set(ylabel="loss (nats per token)", title=args.runs_title)
    axes["loss"].legend()
    first = args.runs[0][0]
    axes["difference"].set(xlabel="optimizer step", ylabel=f"relative to\n{first}", yscale="log", ylim=(1e-8, 1e-3))
    labels, rates = [label for label, _ in args.rates], [float(rate) for _, rate in args.rates]
    bars = axes["rate"].bar(labels, rates, color=["#9aa4b2", "#2f6fde", "#9aa4b2", "#2f6fde"][: len(rates)])
    axes["rate"].bar_label(bars, [f"{rate / 1e3:,.0f} k" for rate in rates])
    axes["rate"].set(ylabel="tokens per second", title=args.rates_title)
    for name in ("loss", "difference"):
        axes[name].grid(alpha=0.3)
    figure.savefig(args.output, dpi=120)


if __name__ == "__main__":
    main()
