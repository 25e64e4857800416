"""Is a training step bound by power? Clock, power and the reasons of a lower clock beside steps and their parts.

    python benchmarks/power.py --models 345m 124m

Each load runs back to back for `--seconds`, of which the first third is not counted. Beside whole steps: the products
of the first model's blocks, of random values and of zeros, by PyTorch's choice and by the fastest of cuBLASLt's
algorithms; attention; a large copy. Where power holds the clock down, "at top" is the time that the load would take if
all of it followed the clock to its top: a lower bound. Unknown options are overrides of the recipe.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from nvml import REASONS, Gpu, Sample, Sampler
from op_matmul import MODELS as SIZES
from op_matmul import Case, block, measure
from timing import capture
from train_step import make_recipe

from dtgpt.ops.attention.flash import flash_attention
from dtgpt.ops.attention.packed import split_qkv
from dtgpt.train.startup import open_trainer

SAMPLES = {"345m": 16, "124m": 64, "1558m": 8}  # of 1024 tokens, a step
WARM_UP = 6  # steps, within which a step is captured
LAYERS = 12  # blocks whose products one graph holds
AHEAD = 4  # runs that are queued
Work = Callable[[], object]


def keep_busy(work: Work, seconds: float) -> float:
    """Run `work` back to back. Returns the seconds of one run."""
    first, marks, count = torch.cuda.Event(enable_timing=True), deque[torch.cuda.Event](), 0
    first.record()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()
        count += 1
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > AHEAD:
            marks.popleft().synchronize()
    marks[-1].synchronize()
    return first.elapsed_time(marks[-1]) / 1e3 / count


def reasons(samples: list[Sample]) -> str:
    """Return the share of samples in which each reason held the clock down."""
    shares = {name: statistics.mean(bool(s.reasons & bit) for s in samples) for bit, name in REASONS.items()}
    return " ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)


def observe(name: str, work: Work, gpu: Gpu, seconds: float, tokens: int = 0) -> dict:
    """Run a load, print a line and return it. tokens: of one run, where it is a step."""
    keep_busy(work, seconds / 3)
    joules, begin = gpu.joules, time.monotonic()
    with Sampler(gpu) as sampler:
        each = keep_busy(work, seconds * 2 / 3)
    joules, span = gpu.joules - joules, time.monotonic() - begin
    found, clocks = sampler.samples, [s.clock for s in sampler.samples]
    clock, top = statistics.mean(clocks), gpu.top_clock
    row = {
        "load": name, "seconds": each, "watts": joules / span, "clock": clock, "joules": joules / span * each,
        "at_top": each * clock / top, "tokens_per_second": tokens / each, "samples": found,
    }  # fmt: skip
    drawn = [s.watts for s in found]
    print(
        f"{name:42s}{each * 1e3:9.3f} ms{row['watts']:6.0f} W (by samples {statistics.mean(drawn):.0f}, at most "
        f"{max(drawn):.0f}) {clock:6.0f} MHz ({min(clocks)} to {max(clocks)}), memory "
        f"{found[-1].memory_clock}, {found[-1].celsius} C, {row['joules']:.2f} J, at top {row['at_top'] * 1e3:.3f} ms"
        + (f", {tokens / each:,.0f} tokens/s, at top {tokens / row['at_top']:,.0f}" if tokens else "")
        + f"; {reasons(found)}",
        flush=True,
    )
    return row


def steps(models: list[str], overrides: list[str], gpu: Gpu, seconds: float) -> Iterator[dict]:
    """Yield the row of each model's step."""
    for model in models:
        sizes = {"micro_batch_size": SAMPLES[model], "micro_batches": 1, "dropout": 0.0}
        options = argparse.Namespace(model=model, plans=["single"], **sizes)
        with open_trainer(make_recipe(options, overrides, "single")[0]) as trainer:
            for _ in range(WARM_UP):
                trainer.train_step()
            yield observe(f"{model} step", trainer.train_step, gpu, seconds, SAMPLES[model] * 1024)
        torch.cuda.empty_cache()


def products(model: str) -> Iterator[tuple[str, Work]]:
    """Yield graphs of the products of LAYERS blocks."""
    cases = list(block(*SIZES[model]))
    with torch.no_grad():
        found = [measure(case, 32, 5) for case in cases]
        graphs = {
            "PyTorch's choice": capture(lambda: run_all(cases, [one.torch for one in found])).replay,
            "fastest algorithms": capture(lambda: run_all(cases, [one.best for one in found])).replay,
        }
    for how, graph in graphs.items():
        yield f"{model} products, random, {how}", graph
    for case in cases:
        for operand in (x for operands in case.operands for x in operands):
            operand.zero_()
    for how, graph in graphs.items():
        yield f"{model} products, zeros, {how}", graph


def run_all(cases: list[Case], works: list[Callable[..., object]]) -> None:
    for layer in range(LAYERS):
        for case, work in zip(cases, works, strict=True):
            work(*case.operands[layer % len(case.operands)])


def others() -> Iterator[tuple[str, Work]]:
    """Yield loads that use other parts of the GPU."""
    qkv = torch.randn(16, 1024, 16, 3, 64, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn(16, 1024, 16, 64, device="cuda").bfloat16()

    def attention() -> None:
        for _ in range(LAYERS):
            torch.autograd.grad(flash_attention(*split_qkv(qkv)), qkv, gradient)

    yield "attention, 16 x 16 heads, both ways", capture(attention).replay
    a, b = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    yield "copy of 1 GiB", lambda: b.copy_(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["345m", "124m"], choices=list(SAMPLES))
    parser.add_argument("--seconds", type=float, default=6, help="of each load")
    parser.add_argument("--json", type=Path, help="write all samples there")
    args, overrides = parser.parse_known_args()
    gpu = Gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {gpu.power_limit:.0f} W, {gpu.top_clock} MHz")
    print("before:", gpu.sample())
    rows = list(steps(args.models, overrides, gpu, args.seconds))
    for name, work in chain(others(), products(args.models[0])):
        rows.append(observe(name, work, gpu, args.seconds / 2))
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
