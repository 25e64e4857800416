"""Draw README's picture: losses of one recipe under several plans, and our step time beside nanoGPT's.

    options="--steps 300 --log.interval 2 --log.eval_interval 300 --optimizer.lr 1e-3 --model.dropout 0.1 --device cpu"
    python recipes/gpt2_tiny.py $options --runs runs/single
    for plan in dp2 zero3 tp2_sp; do
        torchrun --nproc-per-node 2 recipes/gpt2_tiny.py $options --plan $plan --micro_batch_size 16 --runs runs/$plan
    done
    torchrun --nproc-per-node 2 recipes/gpt2_tiny.py $options --plan pp2 --micro_batch_size 8 --runs runs/pp2
    python benchmarks/picture.py --runs "one process=runs/single/gpt2_tiny-001" dp2=runs/dp2/gpt2_tiny-001 \\
        zero3=runs/zero3/gpt2_tiny-001 tp2_sp=runs/tp2_sp/gpt2_tiny-001 pp2=runs/pp2/gpt2_tiny-001

The losses of these runs are kept in curves.json; the first run is the reference of the lower strip: how far every
record of another plan is from it. Step times are the published ones. `all.py --tables` draws the picture anew where its
numbers changed.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from figures import PUBLISHED, ROOT, Row, read_rows
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dtgpt.charts.plot import import_pyplot
from dtgpt.run.records import read_records

PICTURE = ROOT / "docs" / "curves.png"
CURVES = Path(__file__).with_name("curves.json")
STEPS = {"345M": "345m", "345M\ndropout 0.1": "345m dropout", "124M": "124m"}  # scripts of the part nanogpt
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")  # of Okabe and Ito: told apart by the colour-blind
WIDTHS = (8.0, 6.0, 4.2, 2.6, 1.2)  # a thinner line on a thicker one, so that all of them are seen
MARKERS = ("", "o", "s", "^", "x")
BARS = {"nanoGPT": "#9AA4B2", "dtgpt": "#0072B2"}


def losses(run: Path) -> dict[int, float]:
    """Return the training loss by step."""
    return {record["step"]: record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record}


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def draw_curves(upper: Any, lower: Any, curves: dict[str, dict[int, float]]) -> None:
    """Draw the losses, and below them their distance from those of the first run."""
    first, reference = next(iter(curves.items()))
    for (label, curve), color, width, marker in zip(curves.items(), cycle(COLORS), cycle(WIDTHS), cycle(MARKERS)):
        upper.plot(list(curve), list(curve.values()), linewidth=width, color=color, label=label)
        if curve is not reference:
            steps = sorted(reference.keys() & curve.keys())
            apart = [abs(curve[step] - reference[step]) / reference[step] for step in steps]
            lower.plot(steps, apart, marker, markersize=2.5, color=color)
    upper.set(ylabel="training loss (nats per token)", title="gpt2_tiny, fp32, dropout 0.1: five plans, one curve")
    upper.tick_params(labelbottom=False)
    upper.legend(frameon=False)
    lower.set(xlabel="optimizer step", ylabel=f"relative to\n{first}", yscale="log", ylim=(1e-9, 1e-4))
    lower.set_yticks([1e-8, 1e-6, 1e-4])


def step_times(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return by label the milliseconds of a step of each program."""
    found: dict[str, dict[str, float]] = {label: {} for label in STEPS}
    for row in rows:
        for label, script in STEPS.items():
            if (row["gpus"], row["part"], row["script"]) == (1, "nanogpt", script) and "ms" in row.get("figures", {}):
                found[label][row["name"].removeprefix(f"{script}: ")] = row["figures"]["ms"]
    return found


def draw_step_times(axes: Any, times: dict[str, dict[str, float]]) -> None:
    """Draw pairs of bars: milliseconds of a step."""
    for offset, (name, color) in zip((-0.2, 0.2), BARS.items(), strict=True):
        own = [each[name] for each in times.values()]
        bars = axes.bar([i + offset for i in range(len(own))], own, width=0.38, color=color, label=name)
        axes.bar_label(bars, [f"{time:.0f}" for time in own])
    axes.set_xticks(range(len(times)), list(times))
    axes.set(ylabel="milliseconds (lower is better)", title="One training step on one H200, bf16")
    axes.margins(y=0.16)
    axes.legend(frameon=False, ncols=2, loc="upper left")


def digest_of(curves: dict[str, dict[str, float]], times: dict[str, dict[str, float]]) -> str:
    """Return what tells whether a picture has these numbers."""
    return hashlib.sha256(json.dumps([curves, times], sort_keys=True).encode()).hexdigest()


def drawn() -> str | None:
    """Return the digest of the numbers that the picture shows."""
    return Image.open(PICTURE).info.get("numbers")


def redraw(rows: Iterable[Row]) -> None:
    """Draw the picture, unless it shows these numbers already."""
    curves, times = json.loads(CURVES.read_text()), step_times(rows)
    digest = digest_of(curves, times)
    if digest == drawn():
        return
    pyplot = import_pyplot()
    figure, axes = pyplot.subplot_mosaic(
        [["loss", "time"], ["apart", "time"]], figsize=(10, 4.2), layout="constrained",
        height_ratios=[3, 1], width_ratios=[1.7, 1],
    )  # fmt: skip
    by_step = {label: {int(step): loss for step, loss in own.items()} for label, own in curves.items()}
    draw_curves(axes["loss"], axes["apart"], by_step)
    draw_step_times(axes["time"], times)
    for panel in axes.values():
        panel.grid(alpha=0.25, axis="y")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=160)
    numbers = PngInfo()
    numbers.add_text("numbers", digest)
    small = Image.open(PICTURE).convert("RGB").quantize(64)  # a third of the bytes
    small.save(PICTURE, optimize=True, pnginfo=numbers)
    print(PICTURE.relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=pair, nargs="+", help="LABEL=RUN; none: the curves that are kept")
    args = parser.parse_args()
    if args.runs:
        curves = {label: losses(Path(run)) for label, run in args.runs}
        lines = (f"{json.dumps(label)}: {json.dumps(own)}" for label, own in curves.items())
        CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    redraw(read_rows(PUBLISHED))


if __name__ == "__main__":
    main()
