"""What ranks and Triton's interpreter do in test_exact_tp.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.parallel.exact_tp import build, loss, products, rows
from dtgpt.parallel.exact_tp.tree import Share
from tests.support.bodies_exact import bits_of_steps
from tests.support.interpreter import let_kernels_loop


def _whole_addends(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    return x @ (weight.t() if by_inputs else weight)


def _in_turn(addends: Any) -> Tensor:
    first, *others = addends
    for each in others:
        first = first + each
    return first


def _own_rows(share: Share, *given: Any) -> Tensor:
    dy, x, *rest = given
    made = rows.PIECE_SUMS(dy, x, 1, *rest)  # of all rows of the rank at once
    return share.gather(made.expand(share.number, *made.shape[1:])).sum(0) / share.number


# By name: what a plan would do without one part of the capability.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "products": (products.ADDENDS, "definition", _whole_addends),
    "order": (products, "tree_sum", _in_turn),
    "rows": (rows, "_whole", _own_rows),
    "loss": (loss, "tree_sum", _in_turn),
    "pieces": (build, "values_of", lambda settings: mock.Mock(pieces=settings.plan.tp)),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Replace a part of the capability while the context lasts."""
    owner, name, value = FAULTS[fault]
    with mock.patch.object(owner, name, value):
        yield


def bits_with_fault(fault: str, recipe: Recipe) -> dict[str, str]:
    """Return what `bits_of_steps` does of a run with a fault."""
    with planted(fault):
        return bits_of_steps(recipe)


def check_kernels() -> None:
    """Hold the kernels against their definitions, and a part of the pieces against all of them. Numbers of 16 bits are
    fp16 here: numpy has no bf16."""
    from dtgpt.parallel.exact_tp import kernels

    let_kernels_loop()
    torch.manual_seed(0)
    for centred, (samples, length, size) in ((True, (2, 32, 48)), (False, (3, 16, 64))):
        dy, x = torch.randn(2, samples, length, size).half().unbind()
        for given in (x, None):
            check_close(kernels.piece_sums, rows._piece_sums, dy, given, 4, 1e-5, centred)
            whole = kernels.piece_sums(dy, given, 4, 1e-5, centred)
            half = None if given is None else given[:, length // 2 :]
            assert torch.equal(kernels.piece_sums(dy[:, length // 2 :], half, 2, 1e-5, centred), whole[2:])
    x, weight = torch.randn(128, 1024).half(), torch.randn(128, 1024).half() / 16
    for by_inputs in (True, False):
        matrix = weight if by_inputs else weight.t().contiguous()
        for count in (2, 16):
            assert kernels.fits(len(x), 128, 1024 // count)
            check_close(kernels.tree_product, products._addends, x, matrix, count, by_inputs)


def check_close(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *given: Any) -> None:
    expected = theirs(*given)
    torch.testing.assert_close(ours(*given), expected, rtol=2e-3, atol=2e-3)
