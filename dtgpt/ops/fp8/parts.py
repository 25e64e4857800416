"""What ranks exchange at the outer ends of a pair of matrices: the first cut by outputs, the second alike by inputs."""

from typing import Protocol

import torch
from torch import Tensor

from dtgpt.ops.fp8.quantize import quantize, transposed
from dtgpt.ops.fp8.sites import Site


class Parts(Protocol):
    """Activations of which each rank has its part, or which each has whole. Neither method is differentiable."""

    @property
    def cut(self) -> bool:
        """Whether each rank has its part."""

    def gather(self, part: Tensor) -> Tensor:
        """Return the activations `[B, T, H]` that each rank has whole, from each rank's own; of any type."""

    def sum(self, whole: Tensor) -> Tensor:
        """Return the sum of the ranks' `whole` `[B, T, H]`, of which each rank gets its own; maybe in place."""


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
