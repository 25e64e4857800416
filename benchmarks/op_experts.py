"""The experts of a layer, forward and backward, and each of its parts: TFLOP/s on the products' FLOPs.

    python benchmarks/op_experts.py
    python benchmarks/op_experts.py --cases "E128" --variants layer

Weights and inputs are random, and so is the choice: each token's experts are drawn alike, which is real routing of a
model that has not learned; loads differ by a few percent. Router and balance are not in it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from cases import Case, run_cases
from figures import note
from torch import Tensor

from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.moe.mixture import Experts
from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.experts.routing import Choice
from dtgpt.ops.experts.rows import gathered, sorted_rows, summed

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

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(rows, weight, None, order.ends)

    def whole(x: Tensor, first: Tensor, down: Tensor) -> Tensor:
        order = sorted_rows(choice.experts, sizes.experts)
        made = product(layer.activation(product(gathered(x, order), first)), down)
        return summed(made, choice.weights, order)

    rows = gathered(x, order)
    pairs = product(rows, first)
    made = layer.activation(pairs)
    parts: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "layer": (whole, (x, first, down)),
        "gather": (lambda x: gathered(x, order), (x,)),
        "first product": (product, (rows, first)),
        "activation": (layer.activation, (pairs,)),
        "second product": (product, (made, down)),
        "sum": (lambda y, weights: summed(y, weights, order), (product(made, down), choice.weights)),
    }
    name, flops = f"T{sizes.tokens} H{sizes.hidden} F{sizes.width} E{sizes.experts} k{sizes.chosen}", len(rows)
    flops *= 6 * sizes.hidden * sizes.width
    forward = {part: partial(function, *inputs) for part, (function, inputs) in parts.items()}
    both = {part: both_ways(function, *inputs) for part, (function, inputs) in parts.items()}
    return [Case(f"{name}, {FORWARD}", forward, flops=flops), Case(f"{name}, both ways", both, flops=3 * flops)]


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
    found = [case for sizes in SIZES for case in cases_of(sizes)]
    tell_backward(run_cases(found), found)
