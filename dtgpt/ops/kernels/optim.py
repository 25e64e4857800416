"""What serves the rules of weights and the sums of gradients: Triton kernels that take lists of tensors in one launch.

AdamW reads and writes 28 bytes a parameter with bf16 gradients and weights. PyTorch launches a kernel for each tensor
where the dtypes of totals and gradients differ.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, has_triton
from dtgpt.ops.optim.adamw import Slot, Update
from dtgpt.ops.optim.fixed_point import Range


def kernels():
    from dtgpt.ops.kernels import adamw_kernels  # imported on first use, since it needs Triton

    return adamw_kernels


def _table(like: Tensor, tensors: Sequence[Tensor], *columns: Sequence[int]):
    """Return the table of tensors, whose first column is their addresses, on the device of `like`."""
    sizes, addresses = [t.numel() for t in tensors], [t.data_ptr() for t in tensors]
    return kernels().Table(sizes, [addresses, *columns], like.device)


def _adamw(
    first: Tensor,
    slots: Sequence[Slot],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> Update:
    moments = [[t.data_ptr() for t in tensors] for tensors in (exp_avg, exp_avg_sq)]
    narrow = [slot.low_precision for slot in slots]
    addresses = [0 if n is None else n.data_ptr() for n in narrow]
    table = _table(first, [s.master for s in slots], *moments, addresses, [int(slot.decay) for slot in slots])
    dtypes, launch = [None if n is None else n.dtype for n in narrow], kernels().adamw
    return lambda gradients, numbers, skip: launch(table, gradients, dtypes, numbers, skip, betas, eps)


def _accumulate(first: Tensor, totals: Sequence[Tensor]) -> Callable[[list[Tensor]], None]:
    table, launch = _table(first, totals), kernels().accumulate
    return lambda gradients: launch(table, gradients)


def _accumulate_fixed(misfits: Tensor, totals: Sequence[Tensor], range_: Range) -> Callable[[list[Tensor], bool], None]:
    table, launch, unit = _table(misfits, totals), kernels().accumulate_fixed, 2.0**range_.fraction
    return lambda gradients, first: launch(table, gradients, misfits, unit, range_.limit, first)


def _add_of_ranks(out: Tensor, own: Tensor, others: Tensor, misfits: Tensor | None, range_: Range, first: bool) -> None:
    from dtgpt.ops.kernels.fixed_point_kernels import launch_add  # imported on first use, since it needs Triton

    launch_add(own, others, out, misfits, range_.fraction, range_.limit, first)


def _as_floats(total: Tensor, unit: Tensor) -> Tensor:
    from dtgpt.ops.kernels.fixed_point_kernels import as_floats  # likewise

    return as_floats(total, unit)


ADAMW = (by_triton(_adamw),)
ACCUMULATE = (by_triton(_accumulate),)
ACCUMULATE_FIXED = (by_triton(_accumulate_fixed),)
ADD_OF_RANKS = (by_triton(_add_of_ranks),)
AS_FLOATS = (by_triton(_as_floats, lambda total, unit: has_triton(total) and total.is_contiguous()),)
SQUARES_OF_ROWS = (by_triton(lambda x: kernels().squares_of_rows(x), lambda x: has_triton(x) and x.numel() > 0),)
