"""Next-token cross-entropy over logits whose vocabulary may be sharded over the ranks of a group.

Vocabulary parallelism after Megatron-LM (Shoeybi et al. 2019, section 3): a rank holds `[B, T, V / tp]` logits and
sends three numbers per token, its largest logit, its sum of exponentials and the target's logit. Logits are never
gathered. Columns that only pad the token table are excluded from the softmax. A `cap` bounds the logits softly before
the softmax: z becomes `capped(z, cap)`; 0: it stays.

Definition: `reference`, on whole logits. The passes over the rows, `row_terms`, `to_gradient_` and
`to_loss_and_gradient_`, go through them in chunks, so that fp32 logits of full size never exist. `head` runs the passes
between the matrix products of the output projection; `cross_entropy` takes logits that exist already.
Sharding rule: all ranks of the group have the same rows; a rank has the columns `start ... start + V_local`.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.operation import Operation

CHUNK = 1 << 22  # logits that eager code widens to fp32 at a time: 16 MiB


def reference(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean loss of whole logits `[B, T, V]`, V >= vocab_size, in plain torch: the test oracle."""
    return F.cross_entropy(logits[..., :vocab_size].flatten(0, -2).float(), targets.flatten())


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    weights: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Return the mean loss in nats, an fp32 scalar, equal on all ranks of `group` (None: the vocabulary is whole).

    logits: `[B, T, V_local]`, the columns from `start` on; targets: int64 `[B, T]`, global ids below `vocab_size`;
    weights: fp32 `[B, T]`, factors of the losses before their mean is taken; None: 1.
    """
    rows = logits.flatten(0, -2)
    real = real_columns(rows.shape[-1], vocab_size, start)
    factors = None if weights is None else weights.flatten()
    return _CrossEntropy.apply(rows, targets.flatten(), start, real, group, factors, cap)


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return C z / sqrt(z^2 + C^2) of logits z and C = cap, whose magnitude is below C; the logits where cap is 0."""
    return logits if cap == 0 else cap * logits * (logits.square() + cap**2).rsqrt()


def weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the losses `[rows]`, or one number for all, by the rows' weights."""
    return losses if weights is None else losses * weights


def real_columns(width: int, vocab_size: int, start: int) -> int:
    """Return how many of the columns `start ... start + width` are tokens, not padding."""
    return min(max(vocab_size - start, 0), width)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, start: int, real: int, group, weights, cap: float) -> Tensor:
        largest, total, target = over_group(row_terms(logits, targets, start, real, cap), group)
        ctx.save_for_backward(logits, targets, largest, total, weights)
        ctx.numbers = start, real, cap
        return weighted(losses_of(largest, total, target), weights).mean()

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, targets, largest, total, weights = ctx.saved_tensors
        result = logits.clone()
        to_gradient_(result, targets, largest, total, weighted(grad / len(logits), weights), *ctx.numbers)
        return result, None, None, None, None, None, None


def over_group(terms: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Combine the `row_terms` `[3, rows]` of the ranks of the group, each over its columns, to those of whole rows."""
    if group is None:
        return terms
    largest, total, target = terms
    highest = largest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    sums = torch.stack([total * torch.exp(largest - highest), target])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return torch.cat([highest[None], sums])


def losses_of(largest: Tensor, total: Tensor, target: Tensor) -> Tensor:
    """Return the losses `[rows]` from the terms of `row_terms`."""
    return torch.log(total) - (target - largest)  # this difference first: logits may have a large common offset


def _chunks(logits: Tensor) -> list[slice]:
    """Return slices of rows whose fp32 copy is small."""
    count, width = logits.shape
    size = max(1, CHUNK // width)
    return [slice(first, first + size) for first in range(0, count, size)]


def local_terms(logits: Tensor, targets: Tensor, start: int, real: int, cap: float = 0.0) -> Tensor:
    """Return three terms of each row, fp32 `[3, rows]`: its largest logit (-inf where this rank has padding alone), the
    sum of exponentials relative to that logit, and the target's logit (0 where another rank holds it)."""
    if real == 0:
        nothing = torch.zeros(len(logits), device=logits.device)
        return torch.stack([nothing - math.inf, nothing, nothing])
    terms = []
    for rows in _chunks(logits):
        values = capped(logits[rows, :real].float(), cap)
        largest = values.amax(dim=-1)
        total = torch.exp(values - largest[:, None]).sum(dim=-1)
        column = targets[rows] - start
        mine = (column >= 0) & (column < real)
        target = values.gather(-1, column.clamp(0, real - 1)[:, None])[:, 0]
        terms.append(torch.stack([largest, total, torch.where(mine, target, 0)]))
    return torch.cat(terms, dim=1)


def plain_gradient(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    scale: Tensor,
    start: int,
    real: int,
    cap: float = 0.0,
) -> Tensor:
    """Return scale x (softmax - onehot) for this rank's columns, in the logits' dtype, and 0 for padding; scale: fp32,
    one for all rows or `[rows]`."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    values = logits.float()
    probabilities = torch.exp(capped(values, cap) - largest[:, None]) / total[:, None]
    here = columns == (targets - start)[:, None]
    gradient = probabilities - here.float()
    if cap:
        gradient *= (1 + (values / cap).square()) ** -1.5
    return (torch.where(columns < real, gradient, 0) * scale.reshape(-1, 1)).to(logits.dtype)


def _terms_to_gradient_(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    scale: Tensor,
    start: int,
    real: int,
    cap: float = 0.0,
) -> None:
    scale = scale.expand(len(logits))
    for rows in _chunks(logits):
        terms = targets[rows], largest[rows], total[rows], scale[rows]
        logits[rows] = plain_gradient(logits[rows], *terms, start, real, cap)


def _whole_losses(logits: Tensor, targets: Tensor, scale: Tensor | None, real: int, cap: float = 0.0) -> Tensor:
    """Return the losses of whole rows, and where there is a scale replace the logits by the gradient."""
    terms = local_terms(logits, targets, 0, real, cap)
    if scale is not None:
        to_gradient_(logits, targets, terms[0], terms[1], scale, 0, real, cap)
    return losses_of(*terms)


# The terms of `local_terms`, in one pass over the logits.
row_terms = Operation("cross_entropy_terms", local_terms, "of each row max(z), sum(exp(z - max(z))) and z[target]")
# Replace logits `[rows, V_local]` by scale x (softmax - onehot), times the slope of the cap, and by 0 in the padding.
# largest, total: fp32 `[rows]`, terms of whole rows; scale: fp32, one for all rows or `[rows]`, applied before the
# result is rounded.
to_gradient_ = Operation("cross_entropy_gradient", _terms_to_gradient_, "(softmax(z) - onehot) scale, in place")
# Return the losses, fp32 `[rows]`, where this rank holds the whole vocabulary, and unless scale is None apply
# `to_gradient_`.
to_loss_and_gradient_ = Operation(
    "cross_entropy_losses", _whole_losses, "log(sum(exp(z))) - z[target]; the gradient in place"
)
# x, factor: x times a scalar fp32 tensor, rounded once.
scaled = Operation("scaled", torch.mul, "x factor")
