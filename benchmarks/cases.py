"""Medians of CUDA graph replays, interleaved between the variants of a case, against the floor of bytes or FLOPs."""

import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from timing import COPY_RATE, MATRIX_RATE, capture

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    sys.exit("these benchmarks measure CUDA kernels; run them where PyTorch sees a GPU and has Triton")


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


def run_cases(cases: list[Case], rounds: int = 20) -> list[dict]:
    """Measure and print a table: microseconds, TB/s or TFLOP/s on the floor's count, time over the floor."""
    results = []
    for case in cases:
        print(f"\n{case.name}   floor {case.floor * 1e6:.1f} us")
        graphs = {name: capture(work).replay for name, work in case.variants.items()}
        for name, seconds in medians(graphs, rounds).items():
            rate = (
                f"{case.bytes / seconds / 1e12:7.2f} TB/s"
                if case.bytes / COPY_RATE >= case.flops / MATRIX_RATE
                else (f"{case.flops / seconds / 1e12:7.0f} TFLOP/s")
            )
            over = seconds / case.floor if case.floor else float("nan")
            print(f"  {name:28s}{seconds * 1e6:10.1f} us {rate}{over:8.2f} x floor  {case.notes.get(name, '')}")
            results.append({"case": case.name, "variant": name, "us": seconds * 1e6, "over_floor": over})
        del graphs
        torch.cuda.empty_cache()
    return results
