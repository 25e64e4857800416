"""Sums whose bits do not depend on the order of their addends: integers in place of floating-point numbers.

`FixedPointSum` adds gradients as 64-bit integers, in units of 2^-49 (of 2^-32 in fp16, whose numbers are all multiples
of 2^-24). What a gradient has below a unit is cut off. `add_integers` and `add_rounded` do so with what came from the
ranks of a group. `squares_of_rows` and `exact_sum` give the norm.

Sharding rule: sums
are elementwise; rows must be whole, as ZeRO leaves them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation
from dtgpt.ops.optim.optimizer import checked
from dtgpt.util.shared.ordered_sums import sum_by_halves

LARGEST = 61  # binary logarithm of the largest sum: the other two bits hold the sign and the head's gradient of a table
UNITS = tuple(2.0**power for power in (48, 16, -16, -48, -80, -112))  # of the integers of `exact_sum`


def fraction_bits(dtype: torch.dtype) -> int:
    """Return the bits below the point for gradients of weights of a type."""
    return 32 if dtype == torch.float16 else 49


class Range(NamedTuple):
    """What gradients of a type are held to, to be added as integers."""

    fraction: int  # bits below the point
    limit: float  # of an addend's size

    @classmethod
    def of(cls, dtype: torch.dtype, addends: int) -> "Range":
        """Return that of up to `addends` gradients of weights of a type."""
        fraction = fraction_bits(dtype)
        return cls(fraction, torch.tensor(2.0 ** (LARGEST - fraction) / addends).item())  # as kernels read it: in fp32


def _plain_add(misfits: Tensor, totals: Sequence[Tensor], range_: Range) -> Callable[[list[Tensor], bool], None]:
    return partial(_add, misfits, totals, range_)


def _add(misfits: Tensor, totals: Sequence[Tensor], range_: Range, gradients: list[Tensor], first: bool) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        integers, fits = _as_integers(gradient, range_)
        total.copy_(integers) if first else total.add_(integers)
        if fits is not None:
            misfits += (~fits).any()


ACCUMULATE = Operation("accumulate_fixed_point", _plain_add, "totals += integers of gradients, of all tensors")


class FixedPointSum:
    """Sum gradients in int64 `totals`, contiguous tensors whose memory must not be replaced.

    misfits: int64 scalar on the device that becomes positive where a gradient is not finite, or larger than the limit
    of `range_`. The sum is then of no use.
    """

    def __init__(self, totals: Sequence[Tensor], misfits: Tensor, range_: Range):
        self.totals, self.misfits = list(totals), misfits
        self._add: Callable[[list[Tensor], bool], None] = ACCUMULATE(misfits, self.totals, range_)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], first: bool = False) -> None:
        """Add gradients in fp32, bf16 or fp16 to the totals. first: what the totals hold does not count."""
        self._add(checked(gradients, self.totals), first)


@torch.no_grad()
def add_rounded(own: Tensor, others: Tensor, out: Tensor, range_: Range) -> None:
    """Set fp32 `out [n]` to the sum of `own [k n]` and of the rows of `others [ranks - 1, k n]`, all contiguous, where
    each element of the sum has k addends side by side in every row. It is exact but for one rounding; NaN where an
    addend does not fit."""
    ADD_OF_RANKS(out, own, others, None, range_, True)


@torch.no_grad()
def add_integers(own: Tensor, others: Tensor, out: Tensor, misfits: Tensor, range_: Range, first: bool) -> None:
    """Add the same sum to int64 `out [n]`, as integers, or set it in the `first` call; count in the int64 scalar
    `misfits` where addends do not fit."""
    ADD_OF_RANKS(out, own, others, misfits, range_, first)


def _add_of_ranks(out: Tensor, own: Tensor, others: Tensor, misfits: Tensor | None, range_: Range, first: bool) -> None:
    total, fits = _integers_of(own, others, len(out), range_)
    if misfits is None:
        out.copy_(total).mul_(2.0**-range_.fraction)
        if fits is not None:
            out.masked_fill_(~fits, math.nan)
        return
    out.copy_(total) if first else out.add_(total)
    if fits is not None:
        misfits += (~fits).any()


ADD_OF_RANKS = Operation("add_fixed_point_of_ranks", _add_of_ranks, "out += integers of what the ranks of a group sent")


# total int64, unit fp32 scalar: what the integers stand for, fp32.
AS_FLOATS = Operation("floats_of_fixed_point", torch.mul, "total unit")


def _integers_of(own: Tensor, others: Tensor, size: int, range_: Range) -> tuple[Tensor, Tensor | None]:
    """Return (sums `[size]` as integers, whether all addends of each fit; None: they do)."""
    addends = [addend for row in (own, *others) for addend in row.view(size, -1).unbind(1)]
    total, fits = _as_integers(addends[0], range_)
    for addend in addends[1:]:
        integers, inside = _as_integers(addend, range_)
        total += integers
        if inside is not None:
            fits = inside if fits is None else fits & inside
    return total, fits


def _as_integers(gradient: Tensor, range_: Range) -> tuple[Tensor, Tensor | None]:
    """Return (integers, 0 for what does not fit; which elements fit). None: all do, as a CPU sees with less work."""
    scaled, limit = gradient.float() * 2.0**range_.fraction, range_.limit * 2.0**range_.fraction
    if scaled.device.type == "cpu" and scaled.numel() and all(abs(end.item()) <= limit for end in scaled.aminmax()):
        return scaled.long(), None
    fits = scaled.abs() <= limit
    return torch.where(fits, scaled, 0.0).long(), fits


def squares_of_rows(x: Tensor) -> Tensor:
    """Return the sum of squares of each row of `x [R, C]`, or each square of `x [R]`, fp64 `[R]`. The bits of a row's
    sum do not depend on the other rows, nor on their number."""
    if x.dim() == 1:
        return x.double().square()
    return SQUARES_OF_ROWS(x)


def _squares_by_halves(x: Tensor) -> Tensor:
    return sum_by_halves(x.flatten(1).double().square()).sum(1)  # [R, 1], or of rows without columns [R, 0]


SQUARES_OF_ROWS = Operation("squares_of_rows", _squares_by_halves, "sum(x^2) of each row, in fp64")


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
