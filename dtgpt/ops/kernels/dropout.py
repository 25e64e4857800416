"""What serves dropout: Triton kernels that draw a mask in registers, and all keys of a step at once."""

from collections.abc import Sequence

from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, has_triton
from dtgpt.ops.random.dropout import LANES, keep_scale, threshold


def kernels():
    from dtgpt.ops.kernels import dropout_kernels  # imported on first use, since it needs Triton

    return dropout_kernels


def _fits(x: Tensor, key: Tensor, p: float, start: Sequence[int], attention: bool) -> bool:
    return x.dim() == 3 and key.dim() == 2 and start[-1] % LANES == 0 and not attention and has_triton(x)


def _dropout(x: Tensor, key: Tensor, p: float, start: Sequence[int], attention: bool) -> Tensor:
    return kernels().launch_dropout(x.contiguous(), key, threshold(p), keep_scale(p), start)


DROPOUT = (by_triton(_dropout, _fits, "of activations `[B, T, H]` on GPUs"),)
DROPOUT_KEYS = (by_triton(lambda *each: kernels().launch_keys(*each)),)
