"""What tests of flash attention do in Triton's interpreter and on a GPU."""

import torch
from torch import Tensor

from dtgpt.data.document_masks import document_bounds
from dtgpt.ops.attention import flash
from dtgpt.ops.random.dropout import LEVELS, keep_mask, threshold
from dtgpt.ops.random.philox import fold, root_key

# ‖out - ref‖ / ‖ref‖: the probabilities are rounded to the dtype once, gradients twice.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def keys_of(samples: int, seed: int = 5, device: str = "cpu") -> Tensor:
    """Keys `[B, 2]` as the model has them: a slice of those of many sites."""
    return fold(root_key(seed), torch.arange(samples)[:, None], torch.arange(3)).to(device)[:, 1]


def truth(qkv: Tensor, key: Tensor | None, p: float, head_start: int = 0, ends: Tensor | None = None) -> Tensor:
    """In float64, head by head and from the definition: qkv `[B, T, N, 3, D]` -> `[B, T, N, D]`. ends: bool `[B, T]`,
    the last tokens of documents."""
    batch, length, heads, _, width = qkv.shape
    out = []
    for sample in range(batch):
        causal = torch.ones(length, length, dtype=torch.float64, device=qkv.device).tril()
        if ends is not None:
            for last in ends[sample].nonzero().flatten().tolist():
                causal[last + 1 :, : last + 1] = 0
        for head in range(heads):
            q, k, v = qkv[sample, :, head].double().unbind(1)
            scores = (q @ k.T / width**0.5).masked_fill(causal == 0, float("-inf"))
            weights = torch.exp(scores - scores.amax(1, keepdim=True))
            weights = weights / weights.sum(1, keepdim=True)
            if key is not None:
                number = head_start + head
                kept = keep_mask(key[sample], [range(number, number + 1), range(length), range(length)], p)[0]
                weights = weights * kept * LEVELS / (LEVELS - threshold(p))
            out.append(weights @ v)
    return torch.stack(out).unflatten(0, (batch, heads)).transpose(1, 2)


def gradient(out: Tensor, qkv: Tensor, cotangent: Tensor) -> Tensor:
    return torch.autograd.grad(out, qkv, cotangent.to(out.dtype))[0]


def error(found: Tensor, true: Tensor) -> float:
    assert not found.isnan().any()
    return ((found - true).norm() / true.norm().clamp(min=1e-300)).item()


def check(
    shape: tuple, dtype: torch.dtype, p: float, head_start: int = 0, device: str = "cpu", documents: float = 0.0
) -> None:
    """`flash._forward` and its gradient; shape: (B, T, N, D). documents: the share of tokens that end one."""
    batch, length, heads, width = shape
    qkv = torch.randn(batch, length, heads, 3, width).to(dtype).to(device).requires_grad_()
    cotangent = torch.randn(shape).to(dtype).to(device)
    key = keys_of(batch, device=device) if p else None
    ends = torch.rand(batch, length, device=device) < documents if documents else None
    out, _ = flash._forward(qkv, key, p, head_start, None if ends is None else document_bounds(ends))
    assert out.shape == shape and out.is_contiguous() and out.dtype == dtype
    found = gradient(out, qkv, cotangent)
    assert found.shape == qkv.shape and found.is_contiguous() and found.dtype == dtype
    wide = qkv.detach().double().requires_grad_()
    true = truth(wide, key, p, head_start, ends)
    assert error(out, true) < TOLERANCE[dtype]
    true_gradient = gradient(true, wide, cotangent)
    for part in range(3):
        if part == 2 or (length > 1 and documents < 1):  # one query has one probability, 1, whatever q and k are
            assert error(found[..., part, :], true_gradient[..., part, :]) < TOLERANCE[dtype], "qkv"[part]
        else:
            assert found[..., part, :].abs().max() < 0.05


def interpret(*cases: tuple) -> None:
    """In a process with TRITON_INTERPRET=1: the kernels on the CPU in place of the ops' references."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):  # numpy 2.4 makes no number of an array of one element, as the interpreter expects
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
    for op in (flash._forward, flash._backward):
        op._backend_fns["cpu"] = op._backend_fns["cuda"]
    for case in cases:
        check(*case)
