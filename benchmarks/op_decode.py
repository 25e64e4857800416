"""Kernels of decode steps at the sizes of 345M, in bf16: microseconds each inside a CUDA graph, beside cuBLAS and the
bytes' floor. Every product has weights of 24 layers, so that they come from memory and not from a cache."""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import COPY_RATE, capture
from torch import Tensor

from dtgpt.ops.attention.cached import decode_attention
from dtgpt.ops.decode.blocks import Residual, Write, product, residual_norm, run_blocks, run_head
from dtgpt.ops.decode.weights import BlockWeights, HeadWeights

CUDA = torch.device("cuda")
LAYERS, HIDDEN, HEADS, DIM, LENGTH, VOCABULARY = 24, 1024, 16, 64, 1024, 50304
ROWS = (1, 8, 16, 64, 256)


def random(*shape: int) -> Tensor:
    return (0.02 * torch.randn(shape, device=CUDA)).to(torch.bfloat16)


def block_weights() -> BlockWeights:
    wide = 4 * HIDDEN
    return BlockWeights(
        1 + random(HIDDEN), random(HIDDEN), random(3 * HIDDEN, HIDDEN), random(3 * HIDDEN), random(HIDDEN, HIDDEN),
        random(HIDDEN), 1 + random(HIDDEN), random(HIDDEN), random(wide, HIDDEN), random(wide), random(HIDDEN, wide),
        random(HIDDEN), eps=1e-5, head_dim=DIM,
    )  # fmt: skip


def microseconds(work: Callable[[], object], count: int, rounds: int = 20) -> float:
    """Median time of `work` as a graph, over the `count` kernels or blocks that it runs."""
    graph, times = capture(work), []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times)


def line(name: str, rows: int, bytes_moved: float, found: dict[str, float]) -> None:
    cells = "  ".join(f"{label} {value:8.2f}" for label, value in found.items())
    print(f"{name:>22} M={rows:<4} floor {1e6 * bytes_moved / COPY_RATE:7.2f}  {cells}", flush=True)


def main() -> None:
    blocks = [block_weights() for _ in range(LAYERS)]
    head = HeadWeights(1 + random(HIDDEN), random(HIDDEN), random(VOCABULARY, HIDDEN), 1e-5)
    keys, values = ([random(max(ROWS), HEADS, LENGTH, DIM) for _ in blocks] for _ in range(2))
    for rows in ROWS:
        x, wide = random(rows, HIDDEN), random(rows, 4 * HIDDEN)
        slots, positions = torch.arange(rows, device=CUDA), torch.full((rows,), 512, device=CUDA)
        caches = [Write(k, v, slots, positions) for k, v in zip(keys, values, strict=True)]
        queries = random(rows, HEADS, 1, DIM)

        def products(name: str, epilogue: str, x: Tensor, rows: int = rows, caches: list[Write] = caches) -> None:
            def ours() -> None:
                for block, cache in zip(blocks, caches, strict=True):
                    write = cache if epilogue == "qkv" else None
                    product(x, getattr(block, name), getattr(block, f"{name}_bias"), epilogue, write)

            def cublas() -> None:
                for block in blocks:
                    F.linear(x, getattr(block, name), getattr(block, f"{name}_bias"))

            found = {"ours": microseconds(ours, LAYERS), "cuBLAS": microseconds(cublas, LAYERS)}
            line(name, rows, getattr(blocks[0], name).nbytes, found)

        products("qkv", "qkv", x)
        products("proj", "groups", x)
        products("fc", "gelu", x)
        products("out", "groups", wide)
        stream = Residual(x, torch.zeros(8, rows, HIDDEN, device=CUDA), blocks[0].out_bias)
        norm = microseconds(lambda: [residual_norm(stream, b.norm_1, b.norm_1_bias, b.eps) for b in blocks], LAYERS)  # noqa: B023
        line("norm of 8 groups", rows, stream.branch.nbytes, {"ours": norm})
        attention = microseconds(lambda: [decode_attention(queries, *cache) for cache in caches], LAYERS)  # noqa: B023
        cached = rows * 513 * 2 * HIDDEN * 2
        line("attention at 512", rows, cached, {"ours": attention})
        weights = sum(value.nbytes for value in blocks[0] if isinstance(value, Tensor))
        whole = microseconds(lambda: run_blocks(x, blocks, keys, values, slots, positions), LAYERS)  # noqa: B023
        line("block at 512", rows, weights + cached, {"ours": whole})
        line("head", rows, head.table.nbytes, {"ours": microseconds(lambda: run_head(Residual(x), head), 1)})  # noqa: B023


if __name__ == "__main__":
    with torch.no_grad():
        main()
