"""Softmax of scaled and masked attention scores (Vaswani et al. 2017, section 3.2.1) with dropout, in one kernel.

The operation of Megatron-LM's unfused attention: scale, mask (causal, padding or none), softmax in fp32, and dropout by
global index. A query that may attend to nothing has probabilities and gradients 0, not NaN.

Reference: `reference`. Fast path: CUDA C++ (`softmax.cu`), built on first use, for rows of up to 16384 columns. Where
it cannot be built, and for other scores, torch.compile makes kernels of `plain_forward` and `plain_backward`.

Bytes: scores hidden by the causal mask are never read, but zeros are written, since the matrix product that follows
reads whole rows. Without dropout, backward needs the probabilities, which that product saves anyway. With dropout, the
product saves the dropped probabilities, from which the others cannot be recovered; so the operation saves the scores
and 4 bytes per row, and backward computes the probabilities again. Writing the undropped probabilities as well would
take the same memory and move 2/3 more bytes in a causal forward.

Sharding rule: samples and heads may be sharded, rows may not; each shard is a plain tensor. A shard of the heads passes
the global index of its first head in `start`.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.kernels.fused_softmax.softmax_kernels import BACKWARD, FORWARD, SoftmaxLaunch, launch, serves
from dtgpt.ops.random.dropout import attention_dropout, attention_mask, keep_scale

LOG2_E = 1 / math.log(2)


def reference(
    scores: Tensor,
    scale: float,
    mask: str | Tensor | None = None,
    *,
    key: Tensor | None = None,
    p: float = 0.0,
    start: Sequence[int] = (0, 0, 0),
) -> Tensor:
    """Return what `scaled_masked_softmax` does, in plain torch: the test oracle. Scores in fp64 stay in fp64."""
    values = _masked(scores, scale, mask)
    largest = values.detach().amax(dim=-1, keepdim=True)
    exponentials = torch.exp(values - largest.masked_fill(largest == -math.inf, 0))
    total = exponentials.sum(dim=-1, keepdim=True)
    probabilities = exponentials / total.masked_fill(total == 0, 1)
    if key is not None:
        probabilities = attention_dropout(probabilities, key, p, start)
    return probabilities.to(scores.dtype)


def _hidden(scores: Tensor, mask: str | Tensor | None) -> Tensor | None:
    """Return bool, broadcastable to the scores, True where a query may not attend."""
    if not isinstance(mask, str):
        return mask
    queries, columns = scores.shape[-2:]
    return torch.ones(queries, columns, dtype=torch.bool, device=scores.device).triu(1 + columns - queries)


def _masked(scores: Tensor, scale: float, mask: str | Tensor | None) -> Tensor:
    values = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    hidden = _hidden(scores, mask)
    return values if hidden is None else values.masked_fill(hidden, -math.inf)


def scaled_masked_softmax(
    scores: Tensor,
    scale: float,
    mask: str | Tensor | None = None,
    *,
    key: Tensor | None = None,
    p: float = 0.0,
    start: Sequence[int] = (0, 0, 0),
) -> Tensor:
    """Return probabilities after dropout, in the dtype of the scores `[B, N, Q, K]`; differentiable in the scores.

    mask: None; "causal": query i attends to the columns j <= i + K - Q; or a bool tensor `[B, 1, 1 or Q, K]`, True
    where a query may not attend. key: int64 `[B, 2]`, a key for each sample, or None (no dropout). p: the probability
    of dropout. start: global index (head, query, column) of the shard's first element within a sample.
    Raises ValueError where a shape does not fit.
    """
    _check(scores, mask, key, start)
    if p == 0:
        key = None
    if not scores.is_cuda:
        return reference(scores, scale, mask, key=key, p=p, start=start)
    causal = isinstance(mask, str)
    return softmax_forward(scores, None if causal else mask, key, scale, causal, p, list(start))[0]


def _check(scores: Tensor, mask: str | Tensor | None, key: Tensor | None, start: Sequence[int]) -> None:
    if scores.dim() != 4:
        raise ValueError(f"scores have the shape {tuple(scores.shape)}; they need four dimensions [B, N, Q, K]")
    batch, _, queries, columns = scores.shape
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'mask is "{mask}"; the only mask with a name is "causal"')
    elif mask is not None and (
        mask.dtype != torch.bool or mask.shape not in ((batch, 1, 1, columns), (batch, 1, queries, columns))
    ):
        raise ValueError(
            f"a mask is {mask.dtype} {tuple(mask.shape)}; for the scores {tuple(scores.shape)} it is bool "
            f"[{batch}, 1, 1 or {queries}, {columns}]"
        )
    if key is not None and key.shape != (batch, 2):
        raise ValueError(f"keys have the shape {tuple(key.shape)}; {batch} samples need [{batch}, 2]")
    if len(start) != 3:
        raise ValueError(f"start={tuple(start)}; it is an index (head, query, column)")


def empty_log_sums(scores: Tensor, key: Tensor | None) -> Tensor:
    return scores.new_empty(0 if key is None else scores.shape[:-1], dtype=torch.float32)


def plain_forward(
    scores: Tensor, mask: Tensor | None, key: Tensor | None, scale: float, causal: bool, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return probabilities, and under dropout (a key) fp32 `[B, N, Q]`: the binary logarithm of the sum of
    exponentials, inf where nothing may be attended, so that probabilities from it are 0."""
    hidden = "causal" if causal else mask
    result = reference(scores, scale, hidden, key=key, p=p, start=start)
    if key is None:
        return result, empty_log_sums(scores, key)
    log_sums = torch.logsumexp(_masked(scores, scale, hidden), dim=-1).float() * LOG2_E
    return result, log_sums.masked_fill(log_sums == -math.inf, math.inf)


def plain_backward(
    grad: Tensor,
    saved: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    key: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    start: Sequence[int],
) -> Tensor:
    """Return the gradient of the scores. saved: the probabilities or, under dropout, the scores."""
    hidden = _hidden(saved, "causal" if causal else mask)
    probabilities, grad = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (saved, grad))
    if key is not None:
        probabilities = torch.exp2(probabilities * (scale * LOG2_E) - log_sums[..., None])
        ranges = [range(begin, begin + size) for begin, size in zip(start, saved.shape[1:], strict=True)]
        grad = torch.where(attention_mask(key, ranges, p), grad * keep_scale(p), 0)
    if hidden is not None:
        probabilities, grad = probabilities.masked_fill(hidden, 0), grad.masked_fill(hidden, 0)
    total = (probabilities * grad).sum(dim=-1, keepdim=True)
    return (scale * probabilities * (grad - total)).to(saved.dtype)


def cuda_forward(
    scores: Tensor,
    mask: Tensor | None,
    key: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    start: Sequence[int],
    how: SoftmaxLaunch = FORWARD,
) -> tuple[Tensor, Tensor]:
    if not serves(scores, scale, start):
        return _compiled(plain_forward, has_triton(scores))(scores, mask, key, scale, causal, p, start)
    scores, (mask, key) = scores.contiguous(), _contiguous(mask, key)
    result, log_sums = torch.empty_like(scores), empty_log_sums(scores, key)
    launch(how, scores, None, result, log_sums, mask, key, scale, causal, p, start)
    return result, log_sums


def cuda_backward(
    grad: Tensor,
    saved: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    key: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    start: Sequence[int],
    how: SoftmaxLaunch = BACKWARD,
) -> Tensor:
    if not serves(saved, scale, start):
        return _compiled(plain_backward, has_triton(saved))(grad, saved, log_sums, mask, key, scale, causal, p, start)
    grad, saved, (mask, key) = grad.contiguous(), saved.contiguous(), _contiguous(mask, key)
    result = torch.empty_like(saved)
    launch(how, saved, grad, result, log_sums, mask, key, scale, causal, p, start)
    return result


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


@functools.cache
def _compiled(function: Callable, compile: bool) -> Callable:
    # Inside a custom op tensors still have requires_grad set: without no_grad a backward would be compiled, too.
    return torch.no_grad()(torch.compile(function) if compile else function)


softmax_forward = torch.library.custom_op("dtgpt::softmax_forward", plain_forward, mutates_args=())
softmax_backward = torch.library.custom_op("dtgpt::softmax_backward", plain_backward, mutates_args=())
softmax_forward.register_kernel("cuda", cuda_forward)
softmax_backward.register_kernel("cuda", cuda_backward)


softmax_forward.register_fake(lambda scores, mask, key, *_: (_like(scores), empty_log_sums(scores, key)))
softmax_backward.register_fake(lambda grad, saved, *_: _like(saved))


def _save(ctx, inputs, output) -> None:
    scores, mask, key, *ctx.settings = inputs
    probabilities, log_sums = output
    if key is None:  # backward needs no mask, since hidden probabilities are 0
        ctx.save_for_backward(probabilities, log_sums, None, None)
    else:
        ctx.save_for_backward(scores, log_sums, mask, key)


def _differentiate(ctx, grad: Tensor, _):
    return softmax_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 6


softmax_forward.register_autograd(_differentiate, setup_context=_save)
