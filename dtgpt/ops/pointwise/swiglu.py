"""SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) * up.

Gate and up lie interleaved along the last dimension, `[F, 2]`, so that any contiguous cut between pairs keeps each gate
with its factor. Reference: `reference`. Sharding rule: any dimension may be sharded, the last one between pairs.
"""

import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """Return what `swiglu` does, in plain torch: the test oracle."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[.., F]` of x `[.., 2 F]`, whose columns are gate 0, up 0, gate 1, up 1, ..."""
    return reference(x)
