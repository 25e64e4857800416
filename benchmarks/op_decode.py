"""Kernels of decode steps at the sizes of a model, in bf16: microseconds each inside a CUDA graph, beside cuBLAS and
the bytes' floor. Every product has weights of several layers in turn, so that they come from memory, not from a cache.

    python benchmarks/op_decode.py
    python benchmarks/op_decode.py --model llama32_1b --rows 1 64
    python benchmarks/op_decode.py --model olmoe --rows 1 2 4 8 16
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from decode_models import MODELS
from figures import note
from timing import COPY_RATE, capture
from torch import Tensor, nn

from dtgpt.inference.kernels.weights import decode_weights
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.ops.kernels.attention.cached import decode_attention
from dtgpt.ops.kernels.decode.blocks import Residual, Write, product, residual_norm, run_blocks, run_head
from dtgpt.ops.kernels.decode.experts import choice_of, logits_of, rows_of
from dtgpt.ops.kernels.decode.weights import BlockWeights
from dtgpt.parallel.balanced_stages.cut import block_flops
from dtgpt.parallel.cache_sizes import core_sizes

CUDA = torch.device("cuda")
WEIGHTS = 600_000_000  # bytes of the weights of all layers together, at least: many times a cache


def random(*shape: int) -> Tensor:
    return (0.02 * torch.randn(shape, device=CUDA)).to(torch.bfloat16)


def part(module: nn.Module) -> nn.Module:
    """The module with random weights on the GPU."""
    module.to(CUDA, torch.bfloat16)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.02)
    return module


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
    note(f"{name}, {rows} rows", {f"{label} us": value for label, value in found.items()})
    print(f"{name:>22} M={rows:<4} floor {1e6 * bytes_moved / COPY_RATE:7.2f}  {cells}", flush=True)


def measure_experts(x: Tensor, blocks: list[BlockWeights]) -> float:
    """Print the times of the blocks' experts for x `[M, H]`. Return the bytes of those that no row of x chooses."""
    rows, layers = len(x), len(blocks)
    routers = [block.router for block in blocks if block.router is not None]

    def route() -> list[Tensor]:
        return [logits_of(x, router.weight, router.bias) for router in routers]

    logits = route()
    used = statistics.mean(len(choice_of(own, routers[0].rule).experts.unique()) for own in logits)
    stacks = blocks[0].fc.nbytes + blocks[0].out.nbytes
    read = stacks * used / len(routers[0].weight)
    line("router", rows, routers[0].weight.nbytes, {"ours": microseconds(route, layers)})
    made = microseconds(lambda: [rows_of(x, own, block) for own, block in zip(logits, blocks, strict=True)], layers)
    line(f"{used:.1f} experts", rows, read, {"ours": made})
    return stacks - read


def measure(config: ModelConfig, most_rows: list[int], position: int) -> None:
    """Print the times of a block's kernels and of the head, for each number of rows."""
    layers = max(4, WEIGHTS // (2 * block_flops(inventory(config), 0, 0) // 6))
    modules = [part(config.make_block(0)) for _ in range(layers)]
    blocks: list[BlockWeights] = [decode_weights(module) for module in modules]
    head = decode_weights(part(config.make_head()))
    ((kv_heads, dim, _),) = core_sizes(config, 0, 1)
    keys, values = ([random(max(most_rows), kv_heads, config.seq_length, dim) for _ in blocks] for _ in range(2))
    for rows in most_rows:
        slots, positions = torch.arange(rows, device=CUDA), torch.full((rows,), position, device=CUDA)
        caches = [Write(k, v, slots, positions) for k, v in zip(keys, values, strict=True)]
        widths = {name: getattr(blocks[0], name).shape[-1] for name in ("qkv", "proj", "fc", "out")}
        inputs = {name: random(rows, size) for name, size in widths.items()}
        rotary = blocks[0].rotary
        packed = random(rows, kv_heads, config.num_heads // kv_heads + 2, dim)[:, :, :-2]

        def products(
            name: str, epilogue: str, rows: int = rows, caches: list[Write] = caches, inputs: dict = inputs
        ) -> None:
            x, first = inputs[name], getattr(blocks[0], name)

            def ours() -> None:
                for block, cache in zip(blocks, caches, strict=True):
                    bias = None if epilogue == "groups" else getattr(block, f"{name}_bias")
                    product(x, getattr(block, name), bias, epilogue, cache if epilogue == "qkv" else None)

            def cublas() -> None:
                for block in blocks:
                    F.linear(x, getattr(block, name), getattr(block, f"{name}_bias"))

            found = {"ours": microseconds(ours, layers), "cuBLAS": microseconds(cublas, layers)}
            line(name, rows, first.nbytes, found)

        products("qkv", "qkv" if rotary is None else "plain")
        products("proj", "groups")
        x = inputs["qkv"]
        weights = sum(value.nbytes for value in blocks[0] if isinstance(value, Tensor))
        if blocks[0].router is None:
            products("fc", blocks[0].activation)
            products("out", "groups")
        else:
            weights -= measure_experts(x, blocks)
        stream = Residual(x, torch.zeros(8, rows, config.hidden_size, device=CUDA), blocks[0].out_bias)
        norm = microseconds(lambda: [residual_norm(stream, b.norm_1, b.norm_1_bias, b.eps) for b in blocks], layers)  # noqa: B023
        line("norm of 8 groups", rows, 32 * stream.x.numel(), {"ours": norm})
        joint = blocks[0].joint
        attention = microseconds(
            lambda: [decode_attention(packed, *cache, rotary, joint=joint) for cache in caches],  # noqa: B023
            layers,
        )
        cached = rows * (position + 1) * 2 * kv_heads * dim * 2
        line(f"attention at {position}", rows, cached, {"ours": attention})
        whole = microseconds(lambda: run_blocks(x, blocks, keys, values, slots, positions), layers)  # noqa: B023
        line(f"block at {position}", rows, weights + cached, {"ours": whole})
        line("head", rows, head.table.nbytes, {"ours": microseconds(lambda: run_head(Residual(x), head), 1)})  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="345m", choices=MODELS)
    parser.add_argument("--length", type=int, default=1024, help="positions of a slot")
    parser.add_argument("--position", type=int, default=512, help="position of each row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    args = parser.parse_args()
    if not 0 <= args.position < args.length:
        parser.error(f"--position {args.position} is not below --length {args.length}")
    measure(replace(MODELS[args.model], seq_length=args.length), args.rows, args.position)


if __name__ == "__main__":
    with torch.no_grad():
        main()
