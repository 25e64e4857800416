"""Search for the algorithm of a matrix product by time, among those whose result has the bits of PyTorch's own choice.

An algorithm that sums in PyTorch's order differs from it in time alone, so that the outcome of a search, which depends
on noise, cannot change a run. Those that split the sum otherwise are left out.
"""

import math
import statistics
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from dtgpt.ops.matmul.choices import WORKSPACE
from dtgpt.ops.matmul.cublaslt import Algorithm, CublasLtError, Operand, Problem, Product

CANDIDATES = 32  # algorithms to ask the heuristic for
COLD = 128 << 20  # bytes of the operands that take turns, so that none is found in the L2 cache
REPEATS = 3  # of each algorithm, whose results must be equal
FINALISTS = 4
GAIN = 1.01  # by which an algorithm must be faster than PyTorch's choice

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]  # a, b, the result, a bias
Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def by_torch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product by PyTorch's choice: the reference."""
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def search(problem: Problem, device: torch.device) -> Algorithm | None:
    """Return the fastest algorithm for a problem, or None where PyTorch's choice is as fast. Takes tens of
    milliseconds; raises CublasLtError where cuBLASLt cannot compute the product at all."""
    product = Product(problem, device)
    algorithms = product.algorithms(CANDIDATES, WORKSPACE)
    operands = _operands(problem, device)
    runs: dict[Hashable, Run] = {algorithm: product.prepare(algorithm) for algorithm in algorithms}
    equal = _with_equal_bits(runs, operands[0])
    first = _medians({None: by_torch, **equal}, operands, rounds=3)
    finalists = sorted(equal, key=first.__getitem__)[:FINALISTS]
    times = _medians({None: by_torch, **{name: equal[name] for name in finalists}}, operands, rounds=15)
    best = min(times, key=times.__getitem__)
    return best if times[None] > GAIN * times[best] else None  # type: ignore[return-value]


def verify(problem: Problem, algorithm: Algorithm | None, device: torch.device) -> bool:
    """Return whether an algorithm, such as one from a file, runs here and has the bits of PyTorch's choice."""
    if algorithm is None:
        return True
    product = Product(problem, device)
    if not product.accepts(algorithm):
        return False
    return bool(_with_equal_bits({algorithm: product.prepare(algorithm)}, _operands(problem, device, most=1)[0]))


def _operands(problem: Problem, device: torch.device, most: int = 16) -> list[Operands]:
    """Return several sets of random operands."""
    a, b = problem.a, problem.b
    size = 2 * (a.rows * a.columns + b.rows * b.columns + a.rows * b.columns)

    def one() -> Operands:
        out = torch.empty(a.rows, problem.stride, dtype=problem.dtype, device=device)[:, : b.columns]
        bias = torch.randn(b.columns, dtype=problem.dtype, device=device) if problem.bias else None
        return _random(a, device), _random(b, device), out, bias

    return [one() for _ in range(min(most, math.ceil(COLD / size)))]


def _random(operand: Operand, device: torch.device) -> Tensor:
    lines, length = (operand.rows, operand.columns)[:: -1 if operand.transposed else 1]
    x = torch.randn(lines, operand.stride, dtype=operand.dtype, device=device)[:, :length]
    return x.t() if operand.transposed else x


def _with_equal_bits(runs: dict[Hashable, Run], operands: Operands) -> dict[Hashable, Run]:
    """Return the runs whose results are, each time, PyTorch's."""
    expected = by_torch(*operands).clone()

    def agrees(run: Run) -> bool:
        try:
            return all(torch.equal(run(*operands), expected) for _ in range(REPEATS))
        except CublasLtError:  # the heuristic named an algorithm that does not run
            return False

    return {name: run for name, run in runs.items() if agrees(run)}


def _medians(runs: dict[Hashable, Run], operands: list[Operands], rounds: int) -> dict[Hashable, float]:
    """Return the milliseconds of each run, which take turns."""
    times: dict[Hashable, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run(*operands[-1])  # so that the host is ahead of the device
            begin.record()
            for own in operands:
                run(*own)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / len(operands))
    return {name: statistics.median(found) for name, found in times.items()}
