"""SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) * up, and its gradient.

Gate and up lie interleaved along the last dimension, `[F, 2]`, so that any contiguous cut between pairs keeps each gate
with its factor. Reference: `reference`. Fast path: one Triton kernel each way, fp32 inside. Forward saves x alone, from
which backward computes the rest. Sharding rule: any dimension may be sharded, the last one between pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.kernels.devices import takes_custom_op


def reference(x: Tensor) -> Tensor:
    """Return what `swiglu` does, in plain torch: the test oracle."""
    gate, up = wide_pairs(x)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[.., F]` in x's dtype, computed in fp32 at least and rounded once.

    x: `[.., 2 F]`, whose columns are gate 0, up 0, gate 1, up 1, ... Raises ValueError where their number is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; each gate needs its factor")
    return _swiglu(x) if takes_custom_op(x, has_parameters=False) else reference(x)


def kernels():
    from dtgpt.ops.kernels import swiglu_kernels  # imported on first use, since it needs Triton

    return swiglu_kernels


def wide_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up `[.., F]` of x `[.., 2 F]`, in fp32 at least."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


_swiglu = torch.library.custom_op("dtgpt::swiglu", reference, mutates_args=(), device_types="cpu")
_swiglu.register_kernel("cuda", lambda x: kernels().swiglu_forward(x))
_swiglu.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("dtgpt::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx."""
    gate, up = wide_pairs(x)
    dy, gate_sigmoid = dy.to(gate.dtype), gate.sigmoid()
    slope = gate_sigmoid + gate * gate_sigmoid * (1 - gate_sigmoid)
    return torch.stack([dy * up * slope, dy * gate * gate_sigmoid], dim=-1).flatten(-2).to(x.dtype)


swiglu_backward.register_kernel("cuda", lambda dy, x: kernels().swiglu_backward(dy, x))
swiglu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_swiglu.register_autograd(lambda ctx, dy: swiglu_backward(dy, *ctx.saved_tensors), setup_context=_save)
