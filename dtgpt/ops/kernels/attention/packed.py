"""Split a packed QKV projection into q, k and v, and merge their gradients without a copy.

`flash_attention` reads views in place, and writes the gradients of views that `are_packed` into one buffer of the
packed layout. `split` recognises such gradients in backward and returns the buffer; it stacks others, as autograd does
for `unbind`.
"""

import torch
from torch import Tensor

from dtgpt.util.torch_private import constant_result


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `dtgpt.ops.attention.core.split_qkv` does."""
    return _Split.apply(qkv)


@constant_result
def keep_in_graphs() -> bool:
    """Let torch.compile keep the merge of gradients as it is, so that AOTAutograd runs it on tensors that know their
    base. To be called before `split` is compiled: it imports the compiler, which takes a second. Return True."""
    torch.compiler.allow_in_graph(_merge)
    return True


def takes_split(qkv: Tensor) -> bool:
    """Return True, and let torch.compile keep the merge where it compiles the split."""
    return not torch.compiler.is_compiling() or keep_in_graphs()


def are_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k, v `[B, T, N, D]` are laid out like `x.unbind(3)` of a contiguous x `[B, T, N, 3, D]`."""
    _, length, heads, size = q.shape
    row = 3 * heads * size
    same = q.shape == k.shape == v.shape and q.stride() == k.stride() == v.stride()
    offsets = [t.storage_offset() - q.storage_offset() for t in (k, v)]
    return same and offsets == [size, 2 * size] and q.stride() == (length * row, row, 3 * size, 1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return qkv.select(3, 0), qkv.select(3, 1), qkv.select(3, 2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return _merge(dq, dk, dv)


def _merge(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Return the gradient of qkv: the buffer that the three are views of, if there is one, or a copy."""
    base = dq._base
    shared = base is not None and base is dk._base and base is dv._base and are_packed(dq, dk, dv)
    if base is None or not shared or not base.is_contiguous() or base.numel() != 3 * dq.numel():
        return torch.stack([dq, dk, dv], dim=3)
    return base.view(*dq.shape[:3], 3, dq.shape[3])
