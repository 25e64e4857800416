"""Medians of CUDA graph replays, interleaved between the variants of a case, against the floor of bytes or FLOPs.

Options of every script that uses this: --cases PATTERN, --variants PATTERN (regular expressions of names)."""

import argparse
import importlib.util
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from figures import note
from timing import COPY_RATE, MATRIX_RATE, capture
from torch import Tensor

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    sys.exit("these benchmarks measure CUDA kernels; run them where PyTorch sees a GPU and has Triton")

ONE_TILE = 1 << 20  # an occupancy that gives every tile a program of its own


@dataclass
class Case:
    """One operation at one size. `variants`: name -> a function without arguments that runs it once."""

    name: str
    variants: dict[str, Callable[[], object]]
    bytes: float = 0.0  # the fewest that must move: each input read once, each output written once
    flops: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """Seconds."""
        return max(self.bytes / COPY_RATE, self.flops / MATRIX_RATE)


def variants_of(launches: list, work: Callable[[Any], object]) -> dict[str, Callable[[], object]]:
    """The variants of a case that differ in the launch parameters of a kernel, which `work` takes."""
    return {f"{tuple(launch)}": lambda launch=launch: work(launch) for launch in launches}


def both_ways(name: str, fast: Callable, plain: Callable, inputs: list[Tensor], number: int) -> Case:
    """Forward and backward through autograd, and a copy of `number` bytes, read and written."""
    inputs = [t.requires_grad_() for t in inputs]
    outputs = fast(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(t) for t in outputs]

    def both(function: Callable) -> Callable:
        return lambda: torch.autograd.grad(function(*inputs), inputs, gradients)

    half = torch.empty(number // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(half)
    variants = {"ours": both(fast), "eager": both(plain), "copy": lambda: target.copy_(half)}
    variants["compiled"] = both(torch.compile(plain, fullgraph=True, dynamic=False))
    return Case(f"{name}, both ways", variants, bytes=number)


def medians(variants: dict[str, Callable[[], object]], rounds: int = 20) -> dict[str, float]:
    """Seconds of each variant, one after the other in every round. A variant is a function to call as it is."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, work in variants.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def chosen(cases: list[Case]) -> list[Case]:
    """Return the cases, and of each the variants, that the command line asks for by `--cases` and `--variants`, regular
    expressions."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cases", default="")
    parser.add_argument("--variants", default="")
    asked, _ = parser.parse_known_args()
    found = []
    for case in cases:
        variants = {name: work for name, work in case.variants.items() if re.search(asked.variants, name)}
        if variants and re.search(asked.cases, case.name):
            found.append(replace(case, variants=variants))
    return found


def run_cases(cases: list[Case], rounds: int = 20) -> list[dict]:
    """Measure and print a table: microseconds, TB/s or TFLOP/s on the floor's count, time over the floor."""
    results = []
    for case in chosen(cases):
        print(f"\n{case.name}   floor {case.floor * 1e6:.1f} us")
        graphs = {name: capture(work).replay for name, work in case.variants.items()}
        for name, seconds in medians(graphs, rounds).items():
            moves = case.bytes / COPY_RATE >= case.flops / MATRIX_RATE
            unit, rate = ("TB/s", case.bytes / seconds / 1e12) if moves else ("TFLOP/s", case.flops / seconds / 1e12)
            over = seconds / case.floor if case.floor else float("nan")
            told = f"{rate:7.2f}" if moves else f"{rate:7.0f}"
            print(f"  {name:28s}{seconds * 1e6:10.1f} us {told} {unit}{over:8.2f} x floor  {case.notes.get(name, '')}")
            results.append({"case": case.name, "variant": name, "us": seconds * 1e6, "over_floor": over})
            note(f"{case.name}: {name}", {"us": seconds * 1e6, "x floor": over, unit: rate})
        del graphs
        torch.cuda.empty_cache()
    return results
