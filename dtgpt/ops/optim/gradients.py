"""Lists of gradients, in the dtypes that autograd gave them: sums over micro-batches, norms, checks.

Fast path: one Triton kernel, or a few of PyTorch's, for all tensors. Sharding rule: everything but the norms is
elementwise; sums of squares of different shards add up.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import has_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients and of weights


class Accumulator:
    """Sum gradients of micro-batches in fp32 `totals`, contiguous tensors whose memory must not be replaced."""

    def __init__(self, totals: Sequence[Tensor]):
        for i, total in enumerate(totals):
            if total.dtype != torch.float32 or not total.is_contiguous():
                raise ValueError(f"total {i} must be fp32 and contiguous")
        self.totals = list(totals)
        self._table = None
        if has_triton(self.totals[0]):
            from dtgpt.ops.kernels import adamw_kernels

            sizes, addresses = [t.numel() for t in totals], [t.data_ptr() for t in totals]
            self._table = adamw_kernels.Table(sizes, [addresses], self.totals[0].device)

    @torch.no_grad()
    def store(self, gradients: Sequence[Tensor]) -> None:
        """Set totals = gradients, those of the first micro-batch. PyTorch's kernel converts all in a few launches."""
        torch._foreach_copy_(self.totals, checked(gradients, self.totals))

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients to the totals in one pass. (PyTorch launches one kernel per tensor where dtypes differ.)"""
        gradients = checked(gradients, self.totals)
        if self._table is not None:
            from dtgpt.ops.kernels import adamw_kernels

            adamw_kernels.accumulate(self._table, gradients)
        else:
            torch._foreach_add_(self.totals, gradients)


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, fp32 `[len(gradients)]`, accumulated in fp32 at least.

    PyTorch's kernel reads every gradient once, in a few launches for all, and adds the chunks of a tensor in a fixed
    order without atomics: equal gradients give equal sums.
    """
    return _norms(gradients, 2).square_()


def largest_magnitude(gradients: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, fp32 `[len(gradients)]`; 0 for an empty one."""
    return _norms(gradients, math.inf)


def _norms(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor. PyTorch's kernel, which handles empty tensors inconsistently, gets the others."""
    norms = torch.zeros(len(gradients), device=gradients[0].device)
    filled = [(g, norm) for g, norm in zip(gradients, norms.unbind(), strict=True) if g.numel()]
    if filled:
        tensors, cells = zip(*filled, strict=True)
        # On a CPU it adds one square after the other: in fp32, a sum of 10^7 would be wrong by 4e-4.
        inner = torch.float64 if norms.device.type == "cpu" else torch.float32
        torch._foreach_copy_(cells, torch._foreach_norm(tensors, order, dtype=inner))
    return norms


def checked(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, contiguous. Raises ValueError where one does not fit its tensor of `others`."""
    if len(gradients) != len(others):
        raise ValueError(f"{len(gradients)} gradients for {len(others)} tensors")
    for i, (gradient, other) in enumerate(zip(gradients, others, strict=True)):
        if gradient.shape != other.shape or gradient.device != other.device or gradient.dtype not in DTYPES:
            found = f"{gradient.dtype} {tuple(gradient.shape)} on {gradient.device}"
            raise ValueError(f"gradient {i} is {found}; its tensor is {tuple(other.shape)} on {other.device}")
    return [gradient.contiguous() for gradient in gradients]
