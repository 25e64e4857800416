"""Activations that ranks have whole, in 8 bits: those that each has its part of are sent in 8 bits, too."""

import torch
from torch import Tensor

from dtgpt.ops.fp8.quantize import quantize, transposed
from dtgpt.ops.fp8.sites import Site
from dtgpt.ops.local_tensors import Parts


def quantize_whole(
    x: Tensor, site: Site, dtype: torch.dtype, amax: Tensor | None, columns: bool, parts: Parts | None
) -> tuple[Tensor, Tensor, torch.Size]:
    """Return (q, q_t, shape) of the activations `[.., C]` that each rank has whole: what `quantize` does, and their
    shape. Where each rank has its part, it is sent in 8 bits; amax is then that of this rank's."""
    if parts is None or not parts.cut:
        return *quantize(x, site.scale, dtype, amax, rows=True, columns=columns), x.shape
    q, _ = quantize(x, site.scale, dtype, amax, rows=True, columns=False)
    whole = parts.gather(q.view(x.shape))
    q = whole.flatten(0, -2)
    return q, transposed(q) if columns else q.new_empty(0), whole.shape
