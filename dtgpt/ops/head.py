"""The output projection and the cross-entropy of its logits in one op, which makes both gradients in its forward pass.

Logits live for a chunk of rows at a time, in the dtype of the activations, and become their own gradient in place: two
products make the gradients of that chunk while it is there. Backward has nothing to compute again. The idea is known
from Liger Kernel's fused linear cross-entropy (Hsu et al. 2024), the cut of the vocabulary from Megatron-LM (Shoeybi et
al. 2019, section 3).

Reference: `reference`. Fast path: products of PyTorch, and between them the passes of `dtgpt.ops.cross_entropy`, which
read a chunk once and write it once on a GPU. As many rows make a chunk as LOGITS_BYTES allow: one chunk is fastest.
Sharding rule: x `[B, T, H]` is whole on every rank of the group, the weight is cut over the vocabulary. The gradient of
x is then this rank's summand, for the caller to reduce; that of the weight is complete.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtgpt.ops import cross_entropy as passes
from dtgpt.ops.fast import is_apart

LOGITS_BYTES = 2 << 30  # of a chunk of logits: 21 thousand rows of 50304 in 16 bits


def reference(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The test oracle: mean loss of x `[B, T, H]` under the whole weight `[V, H]`."""
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
) -> Tensor:
    """Mean loss in nats over all targets, fp32 scalar, equal on all ranks of `group` (None: the vocabulary is whole).

    x: `[B, T, H]`; weight: `[V_local, H]` in x's dtype, the rows from `start` on, or a DTensor whose rows a mesh of one
    dimension cuts, which says `start` and `group` itself; targets: int64 `[B, T]`, global ids below `vocab_size`.
    scale: scalar on the device, a factor of the gradients and not of the value: `backward()` gives `scale` times the
    gradient of what is returned. It multiplies before anything is rounded, so that a loss scale keeps fp16 gradients,
    of the size 1 / (B T V), from underflow. weights: fp32 `[B, T]`, by which losses are multiplied before their mean
    over all B T; None: 1. Raises ValueError for a DTensor cut in another way.
    """
    if hasattr(weight, "device_mesh"):  # a DTensor; importing the class takes as long as all the rest
        start, group = _cut_of(weight)
        weight = weight.to_local()
    if is_apart():
        loss = passes.cross_entropy(F.linear(x, weight), targets, vocab_size, start, group, weights)
        return loss if scale is None else _Scaled.apply(loss, scale)
    arguments = (x.flatten(0, -2), weight, targets.flatten(), vocab_size, start, group, passes.flat(weights))
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _HeadLoss.apply(*arguments, scale)
    return _loss_alone(*arguments)


def _cut_of(weight: Tensor) -> tuple[int, dist.ProcessGroup | None]:
    """(first row here, group) of a DTensor; rows are cut as torch.chunk cuts them."""
    mesh, placement = weight.device_mesh, weight.placements[0]
    if mesh.ndim == 1 and placement.is_replicate():
        return 0, None
    if mesh.ndim == 1 and placement.is_shard(0):
        size = math.ceil(len(weight) / mesh.size())
        return size * mesh.get_local_rank(), mesh.get_group()
    raise ValueError(
        f"the weight of the head can be cut along its rows by a mesh of one dimension, not {weight.placements}"
    )


def _chunks(count: int, columns: int, vocab_size: int, group: dist.ProcessGroup | None, bytes_each: int) -> list[slice]:
    """Chunks of rows. Ranks of a group take the same ones, though some hold fewer columns than others."""
    columns = columns if group is None else math.ceil(vocab_size / group.size())
    most = max(1, LOGITS_BYTES // (columns * bytes_each))
    size = math.ceil(count / math.ceil(count / most))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _logits(x: Tensor, weight: Tensor, vocab_size: int, group) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits) chunk by chunk, all in the same memory."""
    chunks = _chunks(len(x), len(weight), vocab_size, group, x.element_size())
    memory = x.new_empty(chunks[0].stop, len(weight))
    for rows in chunks:
        yield rows, torch.mm(x[rows], weight.t(), out=memory[: rows.stop - rows.start])


@torch.no_grad()
def _loss_alone(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, start: int, group, weights: Tensor | None
) -> Tensor:
    real = passes.real_columns(len(weight), vocab_size, start)
    chunks = _logits(x, weight, vocab_size, group)
    terms = [passes.row_terms(logits, targets[rows], start, real) for rows, logits in chunks]
    losses = passes.losses_of(*passes.over_group(torch.cat(terms, dim=1), group))
    return passes.weighted(losses, weights).mean()


class _Scaled(torch.autograd.Function):
    """A loss as it is, its gradient times `scale`."""

    @staticmethod
    def forward(ctx, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.saved_tensors[0], None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, start: int, group, weights: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        count = len(x)
        scale = x.new_full((), 1 / count, dtype=torch.float32) if scale is None else scale.float() / count
        real = passes.real_columns(len(weight), vocab_size, start)
        losses, dx, dweight = x.new_empty(count, dtype=torch.float32), x.new_empty(x.shape), None
        for rows, logits in _logits(x, weight, vocab_size, group):
            losses[rows] = _losses_and_gradient_(logits, targets[rows], start, real, group, scale)
            passes.weigh_(logits, None if weights is None else weights[rows])
            torch.mm(logits, weight, out=dx[rows])
            dweight = _add_product(dweight, logits.t(), x[rows], alone=len(logits) == count)
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return passes.weighted(losses, weights).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Not in place: a pipeline schedule that parts the gradients of inputs and weights comes here twice."""
        dx, dweight = (passes.scaled(gradient, grad) for gradient in ctx.saved_tensors)
        return dx, dweight, None, None, None, None, None, None


def _losses_and_gradient_(logits: Tensor, targets: Tensor, start: int, real: int, group, scale: Tensor) -> Tensor:
    """Losses of the rows; their logits become the gradient."""
    if group is None:
        return passes.to_loss_and_gradient_(logits, targets, scale, real)
    largest, total, target = passes.over_group(passes.row_terms(logits, targets, start, real), group)
    passes.to_gradient_(logits, targets, largest, total, scale, start, real)
    return passes.losses_of(largest, total, target)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, alone: bool) -> Tensor:
    """total + a @ b in fp32; in the dtype of both where nothing else is to be added."""
    if alone:
        return a @ b
    if not a.is_cuda or a.dtype == torch.float32:  # the products below are for 16 bits on a GPU
        a, b = a.float(), b.float()
        return a @ b if total is None else total.addmm_(a, b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
