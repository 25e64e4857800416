"""Softmax of scaled and masked attention scores (Vaswani et al. 2017, section 3.2.1) with dropout, in one kernel.

The operation of Megatron-LM's unfused attention: scale, mask (causal, padding or none), softmax in fp32, and dropout by
global index. A query that may attend to nothing has probabilities and gradients 0, not NaN.

Reference: `reference`. Fast path: CUDA C++ (`softmax.cu`), built on first use, for rows of up to 16384 columns. Where
it cannot be built, and for other scores, torch.compile makes kernels of `plain_forward` and `plain_backward`.

Bytes: what causality hides is never read, but is written as zeros, since the matrix product that follows reads whole
rows. Without dropout backward needs the probabilities, which that product saves anyway. With dropout the product saves
the dropped probabilities, which do not tell what was dropped; then the operation keeps the scores and 4 bytes per row,
and backward computes the probabilities again. To write the undropped probabilities as well would take the same memory,
and move 2/3 more bytes in a causal forward.

Sharding rule: samples and heads may be cut, rows not. A shard of the heads says in `start` which head is its first.
DTensors may be cut by heads only without dropout, because all ranks of a mesh pass the same `start`.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dtgpt.ops.dropout import LEVELS, dropout, keep_mask, threshold
from dtgpt.ops.fast import has_triton
from dtgpt.ops.softmax_kernels import BACKWARD, FORWARD, Launch, launch, serves

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
    """The test oracle; arguments as of `scaled_masked_softmax`. Scores in fp64 are worked on in fp64."""
    values = _masked(scores, scale, mask)
    largest = values.detach().amax(dim=-1, keepdim=True)
    exponentials = torch.exp(values - largest.masked_fill(largest == -math.inf, 0))
    total = exponentials.sum(dim=-1, keepdim=True)
    probabilities = exponentials / total.masked_fill(total == 0, 1)
    if key is not None:
        probabilities = dropout(probabilities, key, p, start)
    return probabilities.to(scores.dtype)


def _hidden(scores: Tensor, mask: str | Tensor | None) -> Tensor | None:
    """Bool, broadcastable to the scores: what may not be attended."""
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
    """Probabilities after dropout, in the dtype of the scores `[B, N, Q, K]`; differentiable in the scores.

    mask: None; "causal": query i attends to the columns j <= i + K - Q; or a bool tensor `[B, 1, 1 or Q, K]`, True
    where a query may not attend. key: int64 `[B, 2]`, a key for each sample, or None (no dropout). p: the probability
    of dropout. start: global index (head, query, column) of the first element here within a sample.
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
    """Probabilities, and under dropout fp32 `[B, N, Q]`: the binary logarithm of the sum of exponentials, inf where
    nothing may be attended (so that probabilities from it are 0)."""
    mask = "causal" if causal else mask
    result = reference(scores, scale, mask, key=key, p=p, start=start)
    if key is None:
        return result, empty_log_sums(scores, key)
    log_sums = torch.logsumexp(_masked(scores, scale, mask), dim=-1).float() * LOG2_E
    return result, log_sums.masked_fill(log_sums == -math.inf, math.inf)


def plain_backward(
    grad: Tensor, saved: Tensor, log_sums: Tensor, mask: Tensor | None, key: Tensor | None,
    scale: float, causal: bool, p: float, start: Sequence[int],
) -> Tensor:  # fmt: skip
    """d loss / d scores. `saved`: the probabilities or, under dropout, the scores."""
    hidden = _hidden(saved, "causal" if causal else mask)
    probabilities, grad = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (saved, grad))
    if key is not None:
        probabilities = torch.exp2(probabilities * (scale * LOG2_E) - log_sums[..., None])
        ranges = [range(begin, begin + size) for begin, size in zip(start, saved.shape[1:], strict=True)]
        grad = torch.where(keep_mask(key, ranges, p), grad * (LEVELS / (LEVELS - threshold(p))), 0)
    if hidden is not None:
        probabilities, grad = probabilities.masked_fill(hidden, 0), grad.masked_fill(hidden, 0)
    total = (probabilities * grad).sum(dim=-1, keepdim=True)
    return (scale * probabilities * (grad - total)).to(saved.dtype)


def cuda_forward(
    scores: Tensor, mask: Tensor | None, key: Tensor | None, scale: float, causal: bool, p: float, start: Sequence[int],
    how: Launch = FORWARD,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not serves(scores, scale, start):
        return _compiled(plain_forward, has_triton(scores))(scores, mask, key, scale, causal, p, start)
    scores, mask, key = _contiguous(scores, mask, key)
    result, log_sums = torch.empty_like(scores), empty_log_sums(scores, key)
    launch(how, scores, None, result, log_sums, mask, key, scale, causal, p, start)
    return result, log_sums


def cuda_backward(
    grad: Tensor, saved: Tensor, log_sums: Tensor, mask: Tensor | None, key: Tensor | None,
    scale: float, causal: bool, p: float, start: Sequence[int], how: Launch = BACKWARD,
) -> Tensor:  # fmt: skip
    if not serves(saved, scale, start):
        return _compiled(plain_backward, has_triton(saved))(grad, saved, log_sums, mask, key, scale, causal, p, start)
    grad, saved, mask, key = _contiguous(grad, saved, mask, key)
    result = torch.empty_like(saved)
    launch(how, saved, grad, result, log_sums, mask, key, scale, causal, p, start)
    return result


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


@functools.cache
def _compiled(function: Callable, compile: bool) -> Callable:
    # Inside an operation tensors still say that they require gradients: without no_grad a backward would be compiled.
    return torch.no_grad()(torch.compile(function) if compile else function)


@torch.library.custom_op("dtgpt::softmax_forward", mutates_args=())
def softmax_forward(
    scores: Tensor, mask: Tensor | None, key: Tensor | None, scale: float, causal: bool, p: float, start: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`plain_forward` on any device, the kernel on CUDA. A key means dropout."""
    return plain_forward(scores, mask, key, scale, causal, p, start)


@torch.library.custom_op("dtgpt::softmax_backward", mutates_args=())
def softmax_backward(
    grad: Tensor, saved: Tensor, log_sums: Tensor, mask: Tensor | None, key: Tensor | None,
    scale: float, causal: bool, p: float, start: Sequence[int],
) -> Tensor:  # fmt: skip
    """`plain_backward` on any device, the kernel on CUDA."""
    return plain_backward(grad, saved, log_sums, mask, key, scale, causal, p, start)


softmax_forward.register_kernel("cuda", cuda_forward)
softmax_backward.register_kernel("cuda", cuda_backward)


@softmax_forward.register_fake
def _(scores, mask, key, scale, causal, p, start):
    return torch.empty_like(scores, memory_format=torch.contiguous_format), empty_log_sums(scores, key)


@softmax_backward.register_fake
def _(grad, saved, log_sums, mask, key, scale, causal, p, start):
    return torch.empty_like(saved, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    scores, mask, key, *ctx.settings = inputs
    probabilities, log_sums = output
    if key is None:  # what the mask hides shows in the probabilities
        ctx.save_for_backward(probabilities, log_sums, None, None)
    else:
        ctx.save_for_backward(scores, log_sums, mask, key)


def _differentiate(ctx, grad: Tensor, _):
    return softmax_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 6


softmax_forward.register_autograd(_differentiate, setup_context=_save)


def _cuts(key) -> list[tuple]:
    """(placement of the scores, of what has samples but no heads, of the row statistics, which exist under dropout)."""
    rows = [(Replicate(), Replicate()), (Shard(0), Shard(0))]
    if key is None:
        rows.append((Shard(1), Replicate()))
    return [(scores, samples, Replicate() if key is None else scores) for scores, samples in rows]


def _if(tensor, placement: Shard | Replicate) -> Shard | Replicate | None:
    return None if tensor is None else placement


@register_sharding(torch.ops.dtgpt.softmax_forward.default)
def _(scores, mask, key, scale, causal, p, start):
    return [
        ([rows, sums], [rows, _if(mask, samples), _if(key, samples), None, None, None, None])
        for rows, samples, sums in _cuts(key)
    ]


@register_sharding(torch.ops.dtgpt.softmax_backward.default)
def _(grad, saved, log_sums, mask, key, scale, causal, p, start):
    return [
        ([rows], [rows, rows, sums, _if(mask, samples), _if(key, samples), None, None, None, None])
        for rows, samples, sums in _cuts(key)
    ]
