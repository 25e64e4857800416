"""How the kernels of the experts of a few tokens are launched: `expert_kernels`.

Three launches for the experts of a token: its router's logits, the products of the chosen experts' first matrices with
the function of the gate, and those of their second ones; the sum over a token's slots is one of the norm that follows.
Of several tokens a fourth chooses. Beyond `FEW` tokens rows are sorted by expert, for products of many rows. The bits
of a token do not depend on the others. With the functions of `SAME_BITS` they do not depend on which of the two ways
rows go either: K is one chain in both, and a slot's result is rounded alike; other functions differ in last bits.

Sharding rule: F may be sharded; each rank has an addend of each slot's result.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.experts.few import results_of
from dtgpt.ops.experts.routing import Choice, Routing, choose, weigh
from dtgpt.ops.experts.rows import sorted_rows
from dtgpt.ops.kernels.decode.weights import BlockWeights, RouterWeights
from dtgpt.ops.kernels.devices import by_triton, has_hopper, has_triton, multiprocessors
from dtgpt.ops.linear import may_split
from dtgpt.ops.more_activations import FUNCTIONS

FILLED = 0.9  # of the multiprocessors, by large tiles
FEW = 16  # rows of a tile of these kernels
JOINED = 4  # rows up to which each expert's program normalises a row again
MOST_EXPERTS = 256  # that kernels rank
MOST_AT_ONCE = 128  # of which a product chooses, too: sums have the order of the kernel that does nothing else
ACTIVATIONS = ("silu", *FUNCTIONS)  # that they have
SAME_BITS = ("silu", "gelu_tanh")  # those that have the bits of the kernels behind products of many rows


class Tile(NamedTuple):
    """Columns of a tile, elements of K at a time, and compile options of a product of experts."""

    BN: int
    BK: int
    num_warps: int
    num_stages: int


class Rows(NamedTuple):
    """Results of slots: a token's sum is that of its rows, times their weights."""

    made: Tensor  # [R, H]
    weights: Tensor  # fp32 [M, k]
    places: Tensor | None  # int64 [M, k]: the row of each slot; None: M k rows, in the order of the weights


@functools.cache
def kernels():
    from dtgpt.ops.kernels.decode import expert_kernels  # imported on first use, since it needs Triton

    return expert_kernels


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def choose_tile(dtype: torch.dtype, matrices: int, columns: int, processors: int) -> Tile:
    """Return the tile of a product of few rows with columns of some matrices, as measured on an H200."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 3)
    return Tile(128, 64, 8, 6) if matrices * -(-columns // 128) >= FILLED * processors else Tile(32, 256, 4, 3)


def ranks(rule: Routing, experts: int) -> bool:
    """Return whether kernels choose experts by a rule, without a correction of scores."""
    return rule.score != "sigmoid" and rule.open_groups == rule.groups and experts <= MOST_EXPERTS


def numbers_of(rule: Routing, experts: int) -> dict[str, int | float | bool]:
    """Return the constants by which kernels choose."""
    return {
        "E": experts, "EXPERTS": max(2, power_of_two(experts)), "CHOSEN": rule.chosen,
        "NORMALISED": rule.normalised or rule.score == "softmax_of_chosen", "FACTOR": rule.factor,
    }  # fmt: skip


def logits_of(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits fp32 `[M, E]` of h `[M, H]`, by sums whose order does not depend on M."""
    (rows, size), count, pdl = h.shape, len(weight), has_hopper(h.device)
    logits = torch.empty(rows, count, dtype=torch.float32, device=h.device)
    kernels().router_kernel[(count, rows)](
        h, weight, bias, logits, size, count, BLOCK=power_of_two(size), PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return logits


def norm_and_route(
    stream: Sequence, groups: int, norm: Tensor, eps: float, router: RouterWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, RMSNorm(total), logits) of a `blocks.Residual` of few rows, with `groups` addends."""
    x, branch, branch_bias, weights, places = stream
    (rows, size), count, pdl = x.shape, len(router.weight), has_hopper(x.device)
    out, total = torch.empty_like(x), torch.empty_like(x) if groups else x
    logits = torch.empty(rows, count, dtype=torch.float32, device=x.device)
    kernels().norm_router_kernel[(count, rows)](
        x, branch, branch_bias, weights, places, norm, router.weight, router.bias, total, out, logits, rows, size,
        count, eps, GROUPS=groups, BLOCK=power_of_two(size), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return total, out, logits


def choice_of(logits: Tensor, rule: Routing) -> Choice:
    """Return the experts int64 and their weights fp32, `[M, k]`, by logits `[M, E]`."""
    (rows, count), pdl = logits.shape, has_hopper(logits.device)
    if not ranks(rule, count):
        experts = choose(logits, rule)
        return Choice(experts, weigh(logits, experts, rule))
    experts = torch.empty(rows, rule.chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, rule.chosen, dtype=torch.float32, device=logits.device)
    warps = max(4, power_of_two(count) // 16)
    kernels().choose_kernel[(rows,)](
        logits, experts, weights, **numbers_of(rule, count), PDL=pdl, num_warps=warps, launch_pdl=pdl
    )
    return Choice(experts, weights)


def few_products(
    h: Tensor,
    choice: Choice,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    activation: str,
    logits: Tensor | None = None,
    rule: Routing | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Return the results `[M k, H]` of slots for h `[M, H]`, M up to `FEW`, by stacks first `[E, 2 F, H]` and second
    `[E, H, F]` with biases `[E, ..]` or None.

    logits: of one row, fp32 `[1, E]`, by which to choose first by `rule`, and to fill `choice`; None: it is there.
    """
    rows, count = len(h), len(first)
    chosen = choice.experts.shape[1]
    rule = rule or Routing(chosen)
    inner = torch.empty(rows * chosen, first.shape[1] // 2, dtype=h.dtype, device=h.device)
    made = torch.empty(rows * chosen, second.shape[1], dtype=h.dtype, device=h.device)
    pairs, pdl = rows * chosen <= count, has_hopper(h.device)
    one, matrices, processors = rows == 1, min(rows * chosen, count), multiprocessors(h.device)

    def tile_of(weight: Tensor) -> Tile:
        return choose_tile(h.dtype, matrices, weight.shape[1], processors)

    tiles = tiles or (tile_of(first), tile_of(second))

    def multiply(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, name: str | None, scores: Tensor | None, tile: Tile
    ) -> None:
        _, columns, size = weight.shape
        grid = (matrices, -(-columns // tile.BN))
        kernels().expert_kernel[grid](
            x, weight, bias, scores, *choice, out, rows, columns, size, weight.stride(0), **numbers_of(rule, count),
            SLOTS=power_of_two(chosen), ONE=one, PAIRS=pairs or one, ACTIVATION=name, BM=FEW,
            EVEN=columns % tile.BN == 0 and size % tile.BK == 0, PDL=pdl, launch_pdl=pdl, **tile._asdict(),
        )  # fmt: skip

    multiply(h, first, first_bias, inner, activation, logits, tiles[0])
    multiply(inner, second, second_bias, made, None, None, tiles[1])
    return made


def rows_of(h: Tensor, logits: Tensor, block: BlockWeights) -> Rows:
    """Return the results of the experts that logits fp32 `[M, E]` choose for h `[M, H]`."""
    router, name = block.router, str(block.activation)
    assert router is not None
    given = block.fc, block.fc_bias, block.out, block.out_bias, name
    rows, chosen = len(h), router.rule.chosen
    if rows == 1 and logits.shape[1] <= MOST_AT_ONCE and ranks(router.rule, logits.shape[1]):
        choice = Choice(
            torch.empty(1, chosen, dtype=torch.int64, device=h.device),
            torch.empty(1, chosen, dtype=torch.float32, device=h.device),
        )
        return Rows(few_products(h, choice, *given, logits, router.rule), choice.weights, None)
    choice = choice_of(logits, router.rule)
    if rows <= FEW:
        return Rows(few_products(h, choice, *given), choice.weights, None)
    order = sorted_rows(choice.experts, logits.shape[1])
    return Rows(results_of(h, order, *given), choice.weights, order.places)


def sums_of(made: Tensor, weights: Tensor, places: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sums `[M, H]` of slots in a type."""
    from dtgpt.ops.kernels.expert_kernels import weighted_rows  # imported on first use, since it needs Triton

    return weighted_rows(made, weights, places, dtype)


def _takes_choice(x: Tensor, weight: Tensor, bias: Tensor | None, rule: Routing) -> bool:
    few = x.numel() <= FEW * x.shape[-1]
    return few and may_split() and has_triton(x) and type(weight.data) is Tensor and ranks(rule, len(weight))


def _choose(x: Tensor, weight: Tensor, bias: Tensor | None, rule: Routing) -> Choice:
    choice = choice_of(logits_of(x.flatten(0, -2).contiguous(), weight, bias), rule)
    return Choice(*(each.view(*x.shape[:-1], rule.chosen) for each in choice))


def _takes_sums(x: Tensor, choice: Choice, first: Tensor, *others: Any) -> bool:
    known = others[-1] in (ACTIVATIONS if may_split() else SAME_BITS)
    return known and x.dtype.itemsize <= 4 and 0 < len(x) <= FEW and has_triton(x)


def _sum(x: Tensor, choice: Choice, *others: Any) -> Tensor:
    return sums_of(few_products(x.contiguous(), choice, *others), choice.weights, None, x.dtype)


FEW_TOKENS = f"up to {FEW} decoded tokens"
CHOICE = (by_triton(_choose, _takes_choice, f"{FEW_TOKENS}, not exact; softmax"),)
SUMS = (by_triton(_sum, _takes_sums, f"{FEW_TOKENS}; exact: SwiGLU"),)
