"""Sums whose bits do not depend on the order of their addends: integers in place of floating-point numbers.

`FixedPointSum` adds gradients as 64-bit integers, in units of 2^-49 (of 2^-32 in fp16, whose numbers are all multiples
of 2^-24). What a gradient has below a unit is cut off. `squares_of_rows` and `exact_sum` give the norm.

Fast path: one Triton kernel for all tensors, and one for the rows of a matrix. Sharding rule: sums are elementwise;
rows must be whole, as ZeRO leaves them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.ops.fast import has_triton
from dtgpt.ops.optim.gradients import checked

LARGEST = 61  # binary logarithm of the largest sum: the other two bits hold the sign and the head's gradient of a table
UNITS = tuple(2.0**power for power in (48, 16, -16, -48, -80, -112))  # of the integers of `exact_sum`


def fraction_bits(dtype: torch.dtype) -> int:
    """Return the bits below the point for gradients of weights of a type."""
    return 32 if dtype == torch.float16 else 49


class FixedPointSum:
    """Sum gradients in int64 `totals`, contiguous tensors whose memory must not be replaced.

    misfits: int64 scalar on the device that becomes positive where a gradient is not finite, or too large to be one of
    `addends` in a sum: above 2^12 / addends, in fp16 2^29 / addends. The sum is then of no use.
    """

    def __init__(self, totals: Sequence[Tensor], misfits: Tensor, fraction: int, addends: int):
        self.totals, self.misfits = list(totals), misfits
        self._factor, self._limit = 2.0**fraction, 2.0 ** (LARGEST - fraction) / addends
        self._table = None
        if has_triton(misfits):
            from dtgpt.ops.optim import adamw_kernels

            sizes, addresses = [t.numel() for t in totals], [t.data_ptr() for t in totals]
            self._table = adamw_kernels.Table(sizes, [addresses], misfits.device)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], first: bool = False) -> None:
        """Add gradients in fp32, bf16 or fp16 to the totals. first: what the totals hold does not count."""
        gradients = checked(gradients, self.totals)
        if self._table is not None:
            from dtgpt.ops.optim import adamw_kernels

            numbers = self._factor, self._limit
            adamw_kernels.accumulate_fixed(self._table, gradients, self.misfits, *numbers, first)
            return
        for total, gradient in zip(self.totals, gradients, strict=True):
            wide = gradient.float()
            fits = wide.abs() <= self._limit
            integers = (torch.where(fits, wide, 0.0) * self._factor).long()
            total.copy_(integers) if first else total.add_(integers)
            self.misfits += (~fits).any()


def squares_of_rows(x: Tensor) -> Tensor:
    """Return the sum of squares of each row of `x [R, C]`, or each square of `x [R]`, fp64 `[R]`. The bits of a row's
    sum do not depend on the other rows, nor on their number."""
    if x.dim() == 1:
        return x.double().square()
    if has_triton(x) and x.numel():
        from dtgpt.ops.optim import adamw_kernels

        return adamw_kernels.squares_of_rows(x)
    sums = x.flatten(1).double().square()
    while (columns := sums.shape[1]) > 1:
        half = columns // 2
        halves = sums[:, :half] + sums[:, half : 2 * half]
        sums = torch.cat([halves, sums[:, 2 * half :]], dim=1)
    return sums.sum(1)


def exact_sum(values: Tensor) -> Tensor:
    """Return the sum of non-negative fp64 `values [N]` as int64 `[len(UNITS) + 1]`: multiples of each of the UNITS, and
    the number of values that are not finite or 2^79 and more. The elements of several such sums may be added, of up to
    2^30 values together."""
    fits = values < 2.0**79
    left, found = torch.where(fits, values, 0.0), []
    for unit in UNITS:
        multiples = torch.floor(left / unit)
        left = left - multiples * unit
        found.append(multiples.long().sum())
    return torch.stack([*found, (~fits).sum()])


def rounded(total: Tensor) -> Tensor:
    """Return the fp64 scalar of a sum of `exact_sum`; NaN where a value did not fit."""
    value = torch.zeros((), dtype=torch.float64, device=total.device)
    for multiples, unit in zip(total, UNITS, strict=False):
        value = value + multiples.double() * unit
    return torch.where(total[-1] > 0, math.nan, value)
