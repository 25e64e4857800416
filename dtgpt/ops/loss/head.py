"""The output projection and the cross-entropy of its logits in one op, which makes both gradients in its forward pass.

Autograd would keep the logits from forward to backward: 1.6 GB in 16 bits for 16 samples of 1,024 tokens and GPT-2's
vocabulary, and as much again for their gradient. The gradient of a loss follows from its logits alone, so that nothing
has to wait for backward.

Logits exist for one chunk of rows at a time, in the dtype of the activations, and are replaced in place by their own
gradient; two matrix products then make the chunk's part of the gradients. Backward recomputes nothing. The fusion is
that of Liger Kernel's linear cross-entropy (Hsu et al. 2024), vocabulary parallelism that of Megatron-LM (Shoeybi et
al. 2019, section 3).

Definition: `reference`. Here are PyTorch's matrix products, and between them the passes of `cross_entropy`, which read
and write a chunk once on a GPU. A chunk has as many rows as LOGITS_BYTES allow: one chunk is fastest.
Sharding rule: x `[B, T, H]` is replicated over the group, the weight is sharded over the vocabulary. The gradient of x
is a partial sum, for the caller to reduce; that of the weight is complete.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtgpt.ops.linear import linear, linear_into
from dtgpt.ops.loss import cross_entropy as passes
from dtgpt.ops.operation import is_apart
from dtgpt.util.torch_private import is_dtensor

LOGITS_BYTES = 2 << 30  # of a chunk of logits: 21 thousand rows of 50304 in 16 bits


def reference(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean loss of x `[B, T, H]` under the whole weight `[V, H]`, in plain torch: the test oracle."""
    return passes.reference(F.linear(x, weight), targets, vocab_size)


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    *,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    scale: Tensor | None = None,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return the mean loss in nats, an fp32 scalar, equal on all ranks of `group` (None: the vocabulary is whole).

    x: `[B, T, H]`; weight: `[V_local, H]` in x's dtype, the rows from `start` on, or a DTensor sharded by rows over a
    mesh of one dimension, from which `start` and `group` follow; targets: int64 `[B, T]`, global ids below
    `vocab_size`. scale: scalar on the device, a factor of the gradients but not of the value returned. It is applied
    before anything is rounded, so that a loss scale keeps fp16 gradients, of the size 1 / (B T V), from underflow.
    weights: fp32 `[B, T]`, factors of the losses before the mean over all B T; None: 1. bias: `[V_local]` of the
    logits, in x's dtype and cut as the weight is. cap: logits are bounded softly by it; 0: not. Raises ValueError
    for a DTensor with another placement.
    """
    start, group, weight, bias = local_rows(weight, bias, start, group)
    if is_apart():
        loss = passes.cross_entropy(linear(x, weight, bias), targets, vocab_size, start, group, weights, cap)
        return loss if scale is None else InPlaceOf.apply(loss, loss.detach(), scale)
    x, targets = x.flatten(0, -2), targets.flatten()
    factors = None if weights is None else weights.flatten()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _HeadLoss.apply(x, weight, bias, targets, vocab_size, start, group, factors, cap, scale)
    with torch.no_grad():
        return passes.weighted(rows_losses(x, weight, bias, targets, vocab_size, start, group, cap), factors).mean()


def local_rows(
    weight: Any, bias: Any, start: int, group: dist.ProcessGroup | None
) -> tuple[int, dist.ProcessGroup | None, Tensor, Tensor | None]:
    """Return (global index of the first local row, group, local weight, local bias): those given, or those of DTensors,
    whose rows are sharded as by torch.chunk. Raises ValueError for DTensors that lie otherwise."""
    if not is_dtensor(weight):
        return start, group, weight, bias
    mesh, placement = weight.device_mesh, weight.placements[0]
    own_bias = None if bias is None else bias.to_local()
    if mesh.ndim == 1 and placement.is_replicate():
        return 0, None, weight.to_local(), own_bias
    if mesh.ndim == 1 and placement.is_shard(0):
        size = math.ceil(len(weight) / mesh.size())
        return size * mesh.get_local_rank(), mesh.get_group(), weight.to_local(), own_bias
    raise ValueError(
        f"the head's weight has placements {weight.placements}; it can be sharded by rows over a mesh of one dimension"
    )


def chunk_rows(count: int, columns: int, bytes_each: int) -> int:
    """Return the rows of a chunk of logits, of `count` rows of `columns` of `bytes_each`: chunks are of equal size."""
    most = max(1, LOGITS_BYTES // (columns * bytes_each))
    return math.ceil(count / math.ceil(count / most))


def _chunks(count: int, columns: int, vocab_size: int, group: dist.ProcessGroup | None, bytes_each: int) -> list[slice]:
    """Return slices of rows, the same on all ranks of a group, though some hold fewer columns than others."""
    columns = columns if group is None else math.ceil(vocab_size / group.size())
    size = chunk_rows(count, columns, bytes_each)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int, group) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits) chunk by chunk, all in the same memory."""
    chunks = _chunks(len(x), len(weight), vocab_size, group, x.element_size())
    memory = x.new_empty(chunks[0].stop, len(weight))
    for rows in chunks:
        yield rows, linear_into(x[rows], weight, bias, memory[: rows.stop - rows.start])


def rows_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int, start: int, group, cap: float
) -> Tensor:
    """Return the losses, fp32 `[rows]`."""
    real = passes.real_columns(len(weight), vocab_size, start)
    chunks = _logits(x, weight, bias, vocab_size, group)
    if group is None:
        return torch.cat(
            [passes.to_loss_and_gradient_(logits, targets[rows], None, real, cap) for rows, logits in chunks]
        )
    terms = [passes.row_terms(logits, targets[rows], start, real, cap) for rows, logits in chunks]
    return passes.losses_of(*passes.over_group(torch.cat(terms, dim=1), group))


class InPlaceOf(torch.autograd.Function):
    """Return `value` with the gradient of a loss, times `scale` where it is a tensor."""

    @staticmethod
    def forward(ctx, loss: Tensor, value: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(scale)
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (scale,) = ctx.saved_tensors
        return grad if scale is None else grad * scale, None, None


class _HeadLoss(torch.autograd.Function):
    """The mean loss. Forward makes both gradients, while the logits of a chunk are there; backward scales them."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        vocab_size: int,
        start: int,
        group,
        weights: Tensor | None,
        cap: float,
        scale: Tensor | None,
    ) -> Tensor:
        count = len(x)
        scale = x.new_full((), 1 / count, dtype=torch.float32) if scale is None else scale.float() / count
        real = passes.real_columns(len(weight), vocab_size, start)
        losses, dx, dweight = x.new_empty(count, dtype=torch.float32), x.new_empty(x.shape), None
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows, logits in _logits(x, weight, bias, vocab_size, group):
            factors = scale if weights is None else scale * weights[rows]
            # From here on `logits` are their own gradient.
            losses[rows] = _losses_and_gradient_(logits, targets[rows], start, real, group, factors, cap)
            torch.mm(logits, weight, out=dx[rows])
            if ctx.needs_input_grad[1]:
                dweight = _add_product(dweight, logits.t(), x[rows], alone=len(logits) == count)
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
        dweight = None if dweight is None else dweight.to(weight.dtype)
        ctx.save_for_backward(dx, dweight, None if dbias is None else dbias.to(x.dtype))
        return passes.weighted(losses, weights).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Return scaled copies: a pipeline schedule that splits backward calls this twice."""
        made = (None if gradient is None else passes.scaled(gradient, grad) for gradient in ctx.saved_tensors)
        return *made, *(None,) * 7


def _losses_and_gradient_(
    logits: Tensor, targets: Tensor, start: int, real: int, group, scale: Tensor, cap: float
) -> Tensor:
    """Return the losses of the rows, and replace their logits by the gradient."""
    if group is None:
        return passes.to_loss_and_gradient_(logits, targets, scale, real, cap)
    largest, total, target = passes.over_group(passes.row_terms(logits, targets, start, real, cap), group)
    passes.to_gradient_(logits, targets, largest, total, scale, start, real, cap)
    return passes.losses_of(largest, total, target)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, alone: bool) -> Tensor:
    """Return total + a @ b in fp32, or a @ b in the dtype of both where no other product is to be added."""
    if alone:
        return a @ b
    if not a.is_cuda or a.dtype == torch.float32:  # the products below are for 16 bits on a GPU
        a, b = a.float(), b.float()
        return a @ b if total is None else total.addmm_(a, b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
