"""The experts of a layer, forward and backward, and each of its parts: TFLOP/s on the products' FLOPs.

    python benchmarks/op_experts.py
    python benchmarks/op_experts.py --cases "E128" --variants layer
    python benchmarks/op_experts.py --cases router                     # its product in fp32, in tiles of several sizes

Weights and inputs are random, and so is the choice: each token's experts are drawn alike, which is real routing of a
model that has not learned; loads differ by a few percent. The router is a case of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from cases import Case, run_cases, variants_of
from figures import note
from torch import Tensor

from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.moe.mixture import Experts
from dtgpt.ops.experts.inner import INNER
from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.experts.routing import Choice
from dtgpt.ops.experts.rows import gathered, sorted_rows, summed
from dtgpt.ops.kernels.decode import blocks
from dtgpt.ops.kernels.decode.blocks import Tile, product

FORWARD = "forward"


class Sizes(NamedTuple):
    """A layer: tokens T, hidden size H, width F of an expert, E experts, k of each token."""

    tokens: int
    hidden: int
    width: int
    experts: int
    chosen: int


SIZES = [  # those for which SonicMoE's page shows its own and others' rates, and OLMoE's
    Sizes(24_576, 1536, 256, 128, 8),
    Sizes(24_576, 1536, 1024, 32, 2),
    Sizes(8192, 2048, 1024, 64, 8),
]


def experts_of(sizes: Sizes) -> tuple[Experts, Tensor, Choice]:
    """Return a layer in bf16, its input `[T, H]` and a choice."""
    config = OlmoeConfig(
        num_layers=1, hidden_size=sizes.hidden, num_heads=sizes.hidden // 64, num_kv_heads=sizes.hidden // 64,
        head_dim=64, ffn_hidden_size=sizes.width, num_experts=sizes.experts, experts_per_token=sizes.chosen,
        seq_length=16, vocab_size=257,
    )  # fmt: skip
    with torch.device("cuda"):
        layer = Experts(config).to(torch.bfloat16)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        x = torch.randn(sizes.tokens, sizes.hidden, dtype=torch.bfloat16)
        chosen = torch.rand(sizes.tokens, sizes.experts).topk(sizes.chosen).indices
        weights = torch.rand(sizes.tokens, sizes.chosen).softmax(-1)
    return layer, x, Choice(chosen, weights)


def both_ways(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Return forward and backward of a function: the graph of a backward pass alone cannot be captured."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    grad = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def cases_of(sizes: Sizes) -> list[Case]:
    """Return the parts of a layer forward, and both ways."""
    layer, x, choice = experts_of(sizes)
    order = sorted_rows(choice.experts, sizes.experts)
    first, down = layer.gate_up.weight.detach(), layer.down.weight.detach()

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(rows, weight, None, order.ends)

    def whole(x: Tensor, first: Tensor, down: Tensor) -> Tensor:
        order = sorted_rows(choice.experts, sizes.experts)
        made = multiply(INNER(gathered(x, order), first, None, order.ends, layer.activation_name), down)
        return summed(made, choice.weights, order)

    rows = gathered(x, order)
    pairs = multiply(rows, first)
    made = layer.activation(pairs)
    parts: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "layer": (whole, (x, first, down)),
        "gather": (lambda x: gathered(x, order), (x,)),
        "first product": (multiply, (rows, first)),
        "activation": (layer.activation, (pairs,)),
        "second product": (multiply, (made, down)),
        "sum": (lambda y, weights: summed(y, weights, order), (multiply(made, down), choice.weights)),
    }
    name, flops = f"T{sizes.tokens} H{sizes.hidden} F{sizes.width} E{sizes.experts} k{sizes.chosen}", len(rows)
    flops *= 6 * sizes.hidden * sizes.width
    forward = {part: partial(function, *inputs) for part, (function, inputs) in parts.items()}
    both = {part: both_ways(function, *inputs) for part, (function, inputs) in parts.items()}
    return [Case(f"{name}, {FORWARD}", forward, flops=flops), Case(f"{name}, both ways", both, flops=3 * flops)]


ROUTER_TILES = [
    Tile(64, 32, 32, 4, 3), Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 4, 3), Tile(32, 64, 32, 2, 4),
    Tile(128, 32, 32, 4, 3), Tile(256, 64, 16, 8, 3),
]  # fmt: skip


def router_case(sizes: Sizes) -> Case:
    """Return the product of a router, which has all of K in one chain, in tiles of several sizes."""
    x = torch.randn(sizes.tokens, sizes.hidden, device="cuda")
    weight = 0.02 * torch.randn(sizes.experts, sizes.hidden, device="cuda")
    expected = product(x, weight, None, "plain", exact=True)

    def run(tile: Tile) -> Tensor:
        with mock.patch.object(blocks, "choose_chain", lambda *_: tile):
            return product(x, weight, None, "plain", exact=True)

    for tile in ROUTER_TILES:
        assert torch.equal(run(tile), expected), f"{tile} has other bits"
    variants = {"ours": partial(product, x, weight, None, "plain", exact=True)} | variants_of(ROUTER_TILES, run)
    name = f"router T{sizes.tokens} H{sizes.hidden} E{sizes.experts}"
    return Case(name, variants, flops=2.0 * sizes.tokens * sizes.hidden * sizes.experts)


def tell_backward(results: list[dict], cases: list[Case]) -> None:
    """Print and hand over the rate of the backward pass of each layer: both ways less forward."""
    times = {(row["case"], row["variant"]): row["us"] for row in results}
    for case in cases:
        name = case.name.removesuffix(f", {FORWARD}")
        if (case.name, "layer") in times and (f"{name}, both ways", "layer") in times and name != case.name:
            microseconds = times[f"{name}, both ways", "layer"] - times[case.name, "layer"]
            rate = 2 * case.flops / microseconds / 1e6
            print(f"{name}, backward: layer {microseconds:10.1f} us {rate:7.0f} TFLOP/s")
            note(f"{name}, backward: layer", {"us": microseconds, "TFLOP/s": rate})


if __name__ == "__main__":
    found = [case for sizes in SIZES for case in (*cases_of(sizes), router_case(sizes))]
    tell_backward(run_cases(found), found)
