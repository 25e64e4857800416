"""SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) * up.

Gate and up lie interleaved along the last dimension, `[F, 2]`, so that any contiguous cut between pairs keeps each gate
with its factor. Sharding rule: any dimension may be sharded, the last one between pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.serve import Operation


def reference(x: Tensor) -> Tensor:
    """Return what `swiglu` does, in plain torch: the test oracle."""
    gate, up = wide_pairs(x)
    return (F.silu(gate) * up).to(x.dtype)


SWIGLU = Operation("swiglu", reference, "silu(gate) * up")


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once.

    x: `[.., 2 F]`, whose columns are gate 0, up 0, gate 1, up 1, ... Raises ValueError where their number is odd.
    """
    check_even(x)
    return SWIGLU(x)


def check_even(x: Tensor) -> None:
    """Raise ValueError for an odd number of columns."""
    if x.shape[-1] % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; each gate needs its factor")


def wide_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up
