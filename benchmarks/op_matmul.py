"""Matrix products of training and decoding: PyTorch's choice beside each algorithm that cuBLASLt's heuristic names.

Every time is that of a CUDA graph of several calls whose operands together exceed the L2 cache.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases import medians
from cublaslt import CublasLtError, Operand, Operands, Problem, Product, Run, configuration, version
from timing import MATRIX_RATE, capture
from torch import Tensor

MODELS = {"345m": (16384, 1024), "124m": (65536, 768), "1558m": (8192, 1600)}  # tokens, H
VOCAB = 50304
CACHE = 160 << 20  # bytes of operands of one graph
WORKSPACE = 32 << 20
WAYS = "torch", "best", "same"
Work = Callable[[], object]


class Case(NamedTuple):
    """One product, with several sets of operands."""

    name: str
    operands: list[tuple[Tensor, Tensor, Tensor]]  # a, b, out
    bias: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None  # of fp8
    fast: bool = False

    @property
    def flops(self) -> float:
        a, b, _ = self.operands[0]
        return 2 * len(a) * b.shape[0] * b.shape[1]

    @property
    def problem(self) -> Problem:
        a, b, out = self.operands[0]
        left, right = Operand.of(a), Operand.of(b)
        assert left is not None and right is not None
        options = self.bias is not None, self.scales is not None, self.fast
        return Problem(left, right, out.stride(0), out.dtype, *options)

    def torch(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.scales is not None:
            scale_a, scale_b = self.scales
            return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=self.fast)
        return torch.mm(a, b, out=out) if self.bias is None else F.linear(a, b.t(), self.bias)

    def cublaslt(self, run: Run, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return run(Operands(a, b, out, self.bias, *(self.scales or ())))

    def repeated(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], calls: int) -> Work:
        def work() -> None:
            for call in range(calls):
                product(*self.operands[call % len(self.operands)])

        return work


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def case(name: str, rows: int, columns: int, inner: int, a_by: str = "rows", b_by: str = "rows", bias: bool = False):
    """a `[rows, inner]`, b `[inner, columns]`, each stored by rows or by columns."""
    size = 2 * (rows * columns + rows * inner + columns * inner)
    sets = min(48, max(2, math.ceil(CACHE / size)))

    def one() -> tuple[Tensor, Tensor, Tensor]:
        a = random(rows, inner) if a_by == "rows" else random(inner, rows).t()
        b = random(inner, columns) if b_by == "rows" else random(columns, inner).t()
        return a, 0.02 * b, a.new_empty(rows, columns)

    return Case(name, [one() for _ in range(sets)], random(columns) if bias else None)


def fp8_case(name: str, rows: int, columns: int, inner: int, gradient: bool) -> Case:
    """Both operands lie along the inner dimension, as fp8 on Hopper wants them; gradients are e5m2."""
    one = torch.ones((), device="cuda")
    kind = torch.float8_e5m2 if gradient else torch.float8_e4m3fn

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        a, b = random(rows, inner).to(kind), random(columns, inner).to(torch.float8_e4m3fn)
        return a, b.t(), torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)

    size = 2 * rows * columns + rows * inner + columns * inner
    sets = [operands() for _ in range(max(2, math.ceil(CACHE / size)))]
    return Case(name, sets, None, (one, one), fast=not gradient)


def sizes(hidden: int) -> dict[str, tuple[int, int]]:
    """Columns and inner size of the four matrices of a GPT-2 block."""
    h = hidden
    return {"qkv": (3 * h, h), "proj": (h, h), "fc": (4 * h, h), "out": (h, 4 * h)}


def block(tokens: int, hidden: int) -> Iterator[Case]:
    for name, (columns, inner) in sizes(hidden).items():
        yield case(f"{name} fwd", tokens, columns, inner, b_by="columns", bias=name == "qkv")
        yield case(f"{name} dx", tokens, inner, columns)
        yield case(f"{name} dw", columns, inner, tokens, a_by="columns")


def head(tokens: int, hidden: int) -> Iterator[Case]:
    yield case("head fwd", tokens, VOCAB, hidden, b_by="columns")
    yield case("head dx", tokens, hidden, VOCAB)
    yield case("head dw", VOCAB, hidden, tokens, a_by="columns")


def decode(rows: int, hidden: int) -> Iterator[Case]:
    for name, (columns, inner) in sizes(hidden).items():
        yield case(name, rows, columns, inner, b_by="columns", bias=True)


def decode_heads(hidden: int) -> Iterator[Case]:
    for rows in (64, 256):
        yield case(f"head {rows}", rows, VOCAB, hidden, b_by="columns")


def fp8_block(tokens: int, hidden: int) -> Iterator[Case]:
    for name, (columns, inner) in sizes(hidden).items():
        yield fp8_case(f"{name} fwd", tokens, columns, inner, gradient=False)
        yield fp8_case(f"{name} dx", tokens, inner, columns, gradient=True)
        yield fp8_case(f"{name} dw", columns, inner, tokens, gradient=True)


class Found(NamedTuple):
    """The works of a case, each for the shared number of calls, and what is known about the algorithms."""

    torch: Callable[..., Tensor]
    best: Callable[..., Tensor]
    same: Callable[..., Tensor]  # the best of those whose bits are those of most algorithms
    row: dict[str, Any]


def kinds_of_bits(case: Case, works: dict[Any, Callable[..., Tensor]], repeats: int = 4) -> dict[Any, int | None]:
    """The number of the distinct result that each work gives; None where repeats differ or the call fails."""
    a, b, out = case.operands[0]
    distinct: list[Tensor] = []
    kinds: dict[Any, int | None] = {}
    for name, work in works.items():
        try:
            first = work(a, b, out.fill_(math.nan)).clone()
            stable = all(torch.equal(work(a, b, out), first) for _ in range(repeats))
        except (CublasLtError, RuntimeError) as error:
            print(f"  {case.name} {name}: {error}")
            stable = False
        if not stable:
            kinds[name] = None
            continue
        kinds[name] = next((i for i, other in enumerate(distinct) if torch.equal(other, first)), len(distinct))
        if kinds[name] == len(distinct):
            distinct.append(first)
    return kinds


def measure(case: Case, count: int, rounds: int) -> Found:
    device = torch.device("cuda", torch.cuda.current_device())
    product = Product(case.problem, device)
    algorithms = product.algorithms(count, WORKSPACE)
    works: dict[Any, Callable[..., Tensor]] = {"torch": case.torch}
    works |= {i: partial(case.cublaslt, product.prepare(algorithm)) for i, algorithm in enumerate(algorithms)}
    kinds = kinds_of_bits(case, works)
    calls = min(96, max(len(case.operands), round(6e-4 * MATRIX_RATE / case.flops)))
    usable = [i for i in range(len(algorithms)) if kinds[i] is not None]
    graphs = {i: capture(case.repeated(works[i], calls)).replay for i in usable}
    quick = medians({i: graphs[i] for i in usable}, 5)
    order = sorted(usable, key=quick.__getitem__)
    common = statistics.mode(kinds[i] for i in usable)
    same = [i for i in order if kinds[i] == common]
    chosen = list(dict.fromkeys([*order[:3], *same[:2], 0]))
    variants = {i: graphs[i] for i in chosen if i in graphs}
    variants["torch"] = capture(case.repeated(case.torch, calls)).replay
    if case.scales is None:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        variants["torch lt"] = capture(case.repeated(case.torch, calls)).replay
        torch.backends.cuda.preferred_blas_library("cublas")
    times = {name: seconds / calls * 1e6 for name, seconds in medians(variants, rounds).items()}
    best = min((i for i in chosen if i in times), key=times.__getitem__)
    best_same = min((i for i in same[:2]), key=times.__getitem__)
    exact = case.torch(*case.operands[0]).clone()
    error = (works[best](*case.operands[0]).float() - exact.float()).abs().max() / exact.float().abs().max()
    row = {
        "name": case.name, "torch": times["torch"], "torch_lt": times.get("torch lt"), "first": times.get(0),
        "best": times[best], "best_index": best, "same": times[best_same], "same_index": best_same,
        "algorithms": len(algorithms), "unstable": [i for i in works if kinds[i] is None],
        "kinds": kinds, "torch_kind": kinds["torch"], "common": common, "error": error.item(), "calls": calls,
        "floor": case.flops / MATRIX_RATE * 1e6, "quick": {i: quick[i] / calls * 1e6 for i in order},
        "configurations": [configuration(a) | {"workspace": a.workspace} for a in algorithms],
    }  # fmt: skip
    return Found(case.torch, works[best], works[best_same], row)


def show(found: Found) -> None:
    row = found.row
    best, config = row["best_index"], row["configurations"][row["best_index"]]
    bits = f"bits {row['torch_kind']}/{row['kinds'][best]} of {len(set(row['kinds'].values()))}"
    lt = "" if row["torch_lt"] is None else f" lt {row['torch_lt']:.1f}"
    print(
        f" {row['name']:9s} torch {row['torch']:.1f}{lt} first {row['first'] or 0:.1f} best {row['best']:.1f} "
        f"{row['torch'] / row['best']:.3f}x #{best}/{row['algorithms']} same {row['same']:.1f} {bits} "
        f"id{config['id']} k{config['split_k']} r{config['reduction']} ws{config['workspace'] >> 10}"
        + (f" UNSTABLE {row['unstable']}" if row["unstable"] else "")
    )


def whole(cases: list[Case], found: list[Found], layers: int, rounds: int) -> dict[str, float]:
    """Seconds of all products of `layers` blocks, one after the other."""

    def work(attribute: str) -> Work:
        def run() -> None:
            for layer in range(layers):
                for one, ways in zip(cases, found, strict=True):
                    getattr(ways, attribute)(*one.operands[layer % len(one.operands)])

        return run

    return medians({name: capture(work(name)).replay for name in WAYS}, rounds)


def group(name: str, cases: Iterator[Case], layers: int, args: argparse.Namespace) -> dict[str, Any]:
    made = list(cases)
    found = [measure(one, args.algorithms, args.rounds) for one in made]
    sums = {way: sum(f.row[way] for f in found) for way in WAYS}
    times = whole(made, found, layers, args.rounds)
    print(f"{name}: sums us " + " ".join(f"{way} {value:.1f}" for way, value in sums.items()), end="; ")
    print(f"{layers} layers ms " + " ".join(f"{way} {seconds * 1e3:.3f}" for way, seconds in times.items()), end="; ")
    print(" ".join(f"{way} {times['torch'] / times[way]:.3f}x" for way in WAYS[1:]))
    for one in found:
        show(one)
    return {"group": name, "rows": [one.row for one in found], "whole": times}


def groups() -> dict[str, tuple[Callable[[], Iterator[Case]], int]]:
    made: dict[str, tuple[Callable[[], Iterator[Case]], int]] = {}
    for model, size in MODELS.items():
        made[model] = partial(block, *size), 12
        made[f"head {model}"] = partial(head, min(16384, size[0]), size[1]), 2
    for rows in (64, 256):
        made[f"decode {rows}"] = partial(decode, rows, 1024), 24
    made["decode heads"] = partial(decode_heads, 1024), 2
    made["fp8 345m"] = partial(fp8_block, 16384, 1024), 12
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", default=list(groups()), help="of " + ", ".join(groups()))
    parser.add_argument("--algorithms", type=int, default=32, help="to ask the heuristic for")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {version()}")
    results = []
    for name in args.groups:
        cases, layers = groups()[name]
        try:
            results.append(group(name, cases(), layers, args))
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    with torch.no_grad():
        main()
