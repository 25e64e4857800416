"""Search for the algorithm of a matrix product by time, among those whose result has the bits of PyTorch's own choice.

An algorithm that sums in PyTorch's order differs from it in time alone, so that the outcome of a search, which depends
on noise, cannot change a run. Those that split the sum otherwise are left out.
"""

import functools
import math
import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from dtgpt.ops.matmul.choices import WORKSPACE
from dtgpt.ops.matmul.cublaslt import Algorithm, CublasLtError, Operand, Operands, Problem, Product, Run

Name = TypeVar("Name", bound=Hashable)

CANDIDATES = 32  # algorithms to ask the heuristic for
COLD = 256 << 20  # bytes that are written before products are timed, so that no operand is found in the L2 cache
FILLS = 4  # writes of so many bytes, during which the host launches what is timed
CALLS = 8  # products that are timed at once, at most: as many as the host launches meanwhile
ENOUGH_FLOPS = 1e12  # of all of these, where they are fewer
REPEATS = 4  # of a finalist, whose results must be equal
VARIED = 3  # of the heuristic's algorithms, the fastest ones, whose variants are tried, too
FINALISTS = 6
LOAD = 30  # milliseconds that an algorithm runs alone before it is timed for as long
LOAD_ROUNDS = 3
GAIN = 1.01  # by which an algorithm must be faster than PyTorch's choice


def by_torch(operands: Operands, fast: bool = False) -> Tensor:
    """Return the product by PyTorch's choice: the reference. fast: of fp8, as of `Problem`."""
    a, b, out, bias, scale_a, scale_b = operands
    if scale_a is not None and scale_b is not None:
        return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out.dtype, use_fast_accum=fast)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def search(problem: Problem, device: torch.device) -> Algorithm | None:
    """Return the fastest algorithm for a problem, or None where PyTorch's choice is as fast. Takes a second;
    raises CublasLtError where cuBLASLt cannot compute the product at all."""
    product, operands = Product(problem, device), _operands(problem, device)
    reference = functools.partial(by_torch, fast=problem.fast)

    def equal(algorithms: list[Algorithm]) -> dict[Algorithm, Run]:
        runs = {algorithm: product.prepare(algorithm) for algorithm in algorithms if algorithm.workspace <= WORKSPACE}
        return _with_equal_bits(runs, reference, operands[0])

    named = equal(product.algorithms(CANDIDATES, WORKSPACE))
    varied = [one for algorithm in _fastest(named, operands, VARIED) for one in product.variants(algorithm)]
    every = named | equal(varied)
    chosen = {one: every[one] for one in _fastest(every, operands, FINALISTS)}
    steady = _with_equal_bits(chosen, reference, operands[-1], REPEATS)
    times = _under_load({None: reference, **steady}, operands)
    best = min(times, key=times.__getitem__)
    return best if times[None] > GAIN * times[best] else None


def verify(problem: Problem, algorithm: Algorithm | None, device: torch.device) -> bool:
    """Return whether an algorithm, such as one from a file, runs here and has the bits of PyTorch's choice."""
    if algorithm is None:
        return True
    product = Product(problem, device)
    if not product.accepts(algorithm):
        return False
    reference, (operands,) = functools.partial(by_torch, fast=problem.fast), _operands(problem, device, most=1)
    return bool(_with_equal_bits({algorithm: product.prepare(algorithm)}, reference, operands, REPEATS))


def _operands(problem: Problem, device: torch.device, most: int = CALLS) -> list[Operands]:
    """Return several sets of random operands."""
    a, b = problem.a, problem.b
    size = a.rows * a.columns * a.dtype.itemsize + b.rows * b.columns * b.dtype.itemsize
    size += a.rows * b.columns * problem.dtype.itemsize
    scale = torch.ones((), device=device) if problem.scaled else None

    def one() -> Operands:
        out = torch.empty(a.rows, problem.stride, dtype=problem.dtype, device=device)[:, : b.columns]
        bias = torch.randn(b.columns, dtype=problem.dtype, device=device) if problem.bias else None
        return Operands(_random(a, device), _random(b, device), out, bias, scale, scale)

    return [one() for _ in range(min(most, math.ceil(COLD / size)))]


def _random(operand: Operand, device: torch.device) -> Tensor:
    lines, length = (operand.rows, operand.columns)[:: -1 if operand.transposed else 1]
    wide = torch.bfloat16 if operand.dtype.itemsize == 1 else operand.dtype  # torch draws no fp8
    x = torch.randn(lines, operand.stride, dtype=wide, device=device).to(operand.dtype)[:, :length]
    return x.t() if operand.transposed else x


def _with_equal_bits(runs: Mapping[Name, Run], reference: Run, operands: Operands, repeats: int = 1) -> dict[Name, Run]:
    """Return the runs whose results are, each time, those of the reference."""
    expected = reference(operands).clone()

    def agrees(run: Run) -> bool:
        operands.out.fill_(torch.nan)  # else what an earlier run has left would pass for a result
        try:
            return torch.equal(run(operands), expected)
        except CublasLtError:  # the heuristic named an algorithm that does not run
            return False

    return {name: run for name, run in runs.items() if all(agrees(run) for _ in range(repeats))}


def _fastest(runs: Mapping[Name, Run], operands: list[Operands], count: int) -> list[Name]:
    times = _medians(runs, operands, rounds=2)
    return sorted(times, key=times.__getitem__)[:count]


def _medians(runs: Mapping[Name, Run], operands: list[Operands], rounds: int) -> dict[Name, float]:
    """Return the milliseconds of each run, which take turns."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    a, b = operands[0][:2]
    calls = max(len(operands), min(CALLS, math.ceil(ENOUGH_FLOPS / (2 * len(a) * b.numel()))))
    other = torch.empty(COLD, dtype=torch.uint8, device=a.device)
    for _ in range(rounds):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(FILLS):
                other.zero_()
            begin.record()
            for call in range(calls):
                run(operands[call % len(operands)])
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def _under_load(runs: Mapping[Name, Run], operands: list[Operands]) -> dict[Name, float]:
    """Return the milliseconds of each run while nothing else runs for a while: large products bring a GPU to its power
    limit, where its clock follows from what an algorithm draws."""
    graphs = {name: _captured(run, operands) for name, run in runs.items()}
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(LOAD_ROUNDS):
        for name, graph in graphs.items():
            count = max(1, round(LOAD / _milliseconds(graph, 1)))
            _milliseconds(graph, count)
            times[name].append(_milliseconds(graph, count) / len(operands))
    return {name: statistics.median(found) for name, found in times.items()}


def _captured(run: Run, operands: list[Operands]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for own in operands:
            run(own)
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Return the milliseconds of `count` replays."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
