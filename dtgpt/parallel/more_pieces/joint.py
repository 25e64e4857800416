"""A norm of all heads together, whose sums over the heads are made of pieces."""

from typing import Any

import torch
from torch import Tensor

from dtgpt.parallel.exact_tp.products import COLUMN_SUMS
from dtgpt.parallel.exact_tp.tree import Share, tree_sum
from dtgpt.util.shared.ordered_sums import sum_by_halves


def joint_norm(share: Share, width: int, eps: float, x: Tensor, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean over the `width` columns of all ranks, of which x `[B, T, N]`
    and weight `[N]` are this rank's. Computed in fp32 at least and rounded once."""
    return _JointNorm.apply(x, weight, share, width, eps)


def _sum_of_all(share: Share, x: Tensor) -> Tensor:
    """Return the sum `[B, T, 1]` over the columns of all ranks, of each piece by halves: in an order that depends on
    neither ranks nor rows."""
    parts = sum_by_halves(x.unflatten(-1, (share.number, -1)))
    return tree_sum(share.gather(parts.movedim(-2, 0).contiguous()).unbind())


class _JointNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: Share, width: int, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(_sum_of_all(share, wide.square()) / width + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.share, ctx.width = share, width
        return (wide * scale * weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        dy, normed = grads[0].to(scale.dtype), x.to(scale.dtype) * scale
        of_normed = dy * weight.to(scale.dtype)
        mean = _sum_of_all(ctx.share, of_normed * normed) / ctx.width
        dx = ((of_normed - normed * mean) * scale).to(x.dtype)
        dweight = COLUMN_SUMS((dy * normed).flatten(0, -2), ctx.share.number) if ctx.needs_input_grad[1] else None
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None, None
