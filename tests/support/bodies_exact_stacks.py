"""What ranks and Triton's interpreter do in test_exact_tp_experts.py."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.optim.balance.state import Balances
from dtgpt.parallel.exact_tp.tree import Share
from dtgpt.parallel.more_pieces import build, joint, stacks
from dtgpt.parallel.more_pieces.owners import Owners
from tests.support.bodies_exact import bits_of_gradients
from tests.support.bodies_exact_tp import check_close


def _whole_addends(x: Tensor, weight: Tensor, ends: Tensor, count: int, by_inputs: bool) -> Tensor:
    return stacks.product(x, weight, ends, by_inputs)


def _own_sum(share: Share, x: Tensor) -> Tensor:
    return share._replace(number=1).gather(x.sum(-1, keepdim=True)[None]).sum(0)


def _one_adds(self: Balances, *given: Any, each_adds: bool = False, **named: Any) -> None:
    INIT(self, *given, **named)


INIT = Balances.__init__
# By name: what a plan would do without one part of what experts need.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "addends": (stacks.ADDENDS, "definition", _whole_addends),
    "order": (stacks, "tree_sum", sum),
    "sums over ranks": (build, "sum_of_ranks", lambda building: None),
    "routers": (build, "WHOLE", tuple(role for role in build.WHOLE if role is not build.Role.ROUTER)),
    "biases": (build, "WHOLE", tuple(role for role in build.WHOLE if role is not build.Role.ROW_STACK)),
    "balance": (Balances, "__init__", _one_adds),
    "owners": (Owners, "own_of_all", lambda self, of_tokens: of_tokens),
    "all heads": (joint, "_sum_of_all", _own_sum),
}


def bits_with_fault(fault: str, recipe: Recipe) -> dict[str, str]:
    """Return what `bits_of_gradients` does of a run with a fault."""
    with mock.patch.object(*FAULTS[fault]):
        return bits_of_gradients(recipe)


def check_kernels() -> None:
    """Hold the kernel against its definition, and a part of the pieces against all of them."""
    from dtgpt.parallel.more_pieces import stack_kernels

    torch.manual_seed(0)
    ends = torch.tensor([5, 5, 150, 153], dtype=torch.int32)
    for by_inputs, count, terms, columns in ((True, 8, 64, 136), (False, 2, 32, 72), (True, 16, 32, 40)):
        x, weight = torch.randn(160, count * terms).half(), torch.randn(4, columns, count * terms).half() / 16
        matrices = weight if by_inputs else weight.mT.contiguous()
        made = partial(_inside, stack_kernels.stack_tree, ends)
        check_close(made, partial(_inside, stacks.ADDENDS.definition, ends), x, matrices, count, by_inputs)
        halves = zip(x.chunk(2, 1), matrices.chunk(2, 2 if by_inputs else 1), strict=True)
        one, other = (made(part.contiguous(), w.contiguous(), count // 2, by_inputs) for part, w in halves)
        assert torch.equal(one + other, made(x, matrices, count, by_inputs))


def _inside(function: Any, ends: Tensor, x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    return function(x, weight, ends, count, by_inputs)[: ends[-1]]
