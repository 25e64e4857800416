"""Next-token cross-entropy over logits whose vocabulary may be cut over the ranks of a group.

Vocabulary parallelism after Megatron-LM (Shoeybi et al. 2019, section 3): a rank holds `[B, T, V / tp]` logits and
sends three numbers per token, its largest logit, its sum of exponentials and the target's logit. Logits are never
gathered. The columns that only pad the table, wherever they lie, stay outside the softmax.

Reference: `reference`, on whole logits. Fast path: the same local passes for one rank and for many; eager code walks
through the rows in chunks and compiled code is one fused kernel, so fp32 logits of full size never exist; backward
computes the probabilities again from the logits and the logarithm of the sum.
Sharding rule: rows alike on all ranks of the group, columns `start ... start + V_local` here.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 22  # logits that eager code widens to fp32 at a time: 16 MiB


def reference(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The test oracle: mean loss of whole logits `[B, T, V]`, V >= vocab_size."""
    return F.cross_entropy(logits[..., :vocab_size].flatten(0, -2).float(), targets.flatten())


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
) -> Tensor:
    """Mean loss in nats, fp32 scalar, equal on all ranks of `group` (None: this rank holds the whole vocabulary).

    logits: `[B, T, V_local]`, the columns from `start` on; targets: int64 `[B, T]`, global ids below `vocab_size`.
    fused: let torch.compile make one kernel of each local pass.
    """
    rows = logits.flatten(0, -2)
    real = min(max(vocab_size - start, 0), rows.shape[-1])
    return _CrossEntropy.apply(rows, targets.flatten(), start, real, group, fused)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, start: int, real: int, group, fused: bool) -> Tensor:
        terms = _compiled(local_terms) if fused else local_terms
        largest, total, target = terms(logits, targets, start, real)
        if group is not None:
            highest = largest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            sums = torch.stack([total * torch.exp(largest - highest), target])
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            (total, target), largest = sums, highest
        log_total = torch.log(total)
        ctx.save_for_backward(logits, targets, largest, log_total)
        ctx.start, ctx.real, ctx.fused = start, real, fused
        return (log_total - (target - largest)).mean()  # differences first: logits may have a large common offset

    @staticmethod
    def backward(ctx, grad: Tensor):
        gradient = _compiled(local_gradient) if ctx.fused else local_gradient
        return gradient(*ctx.saved_tensors, grad, ctx.start, ctx.real), None, None, None, None, None


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _chunks(logits: Tensor) -> list[slice]:
    """All rows at once for the compiler, which fuses the widening into the reduction."""
    count, width = logits.shape
    size = count if torch.compiler.is_compiling() else max(1, CHUNK // width)
    return [slice(first, first + size) for first in range(0, count, size)]


def local_terms(logits: Tensor, targets: Tensor, start: int, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row `[V_local]`, fp32 `[rows]` each: the largest logit (-inf where a rank has padding alone), the sum of
    exponentials relative to it, and the target's logit (0 where another rank holds it)."""
    if real == 0:
        nothing = torch.zeros(len(logits), device=logits.device)
        return nothing - math.inf, nothing, nothing
    terms = []
    for rows in _chunks(logits):
        values = logits[rows, :real].float()
        largest = values.amax(dim=-1)
        total = torch.exp(values - largest[:, None]).sum(dim=-1)
        column = targets[rows] - start
        mine = (column >= 0) & (column < real)
        target = values.gather(-1, column.clamp(0, real - 1)[:, None])[:, 0]
        terms.append((largest, total, torch.where(mine, target, 0)))
    return tuple(torch.cat(parts) for parts in zip(*terms, strict=True))


def local_gradient(
    logits: Tensor, targets: Tensor, largest: Tensor, log_total: Tensor, grad: Tensor, start: int, real: int
) -> Tensor:
    """d loss / d logits of this rank's columns, in their dtype: (softmax - onehot) / rows, and 0 for padding."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    scale = grad / len(logits)

    def gradient(rows: slice) -> Tensor:
        share = torch.exp(logits[rows].float() - largest[rows, None] - log_total[rows, None])
        here = columns == (targets[rows] - start)[:, None]
        return (torch.where(columns < real, share - here.float(), 0) * scale).to(logits.dtype)

    if torch.compiler.is_compiling():
        return gradient(slice(None))
    result = torch.empty_like(logits)
    for rows in _chunks(logits):
        result[rows] = gradient(rows)
    return result
