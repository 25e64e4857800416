"""The protocol of optimizers, and the lists of gradients that they get.

It is not `torch.optim.Optimizer`, which makes its state in the first step, keeps it by parameter, and takes gradients
from parameters. Here state is there before the first step, by name and with the shape of the shard, since checkpoints
cut it anew for another plan; and gradients, learning rate, factor and the flag to skip are tensors on the device, since
a step that is captured as a CUDA graph takes other values in each replay.

What training, checkpoints and planning know of the rule that changes the weights is `Optimizer`. A rule is a config
class, derived from `dtgpt.config.sections.OptimizerConfig`, and the class that its `make` returns; docs/seams.md
explains how to add one.

Gradients come in the dtypes that autograd gave them. Sums over micro-batches, norms and checks are a few kernels of
PyTorch for all tensors. Sharding rule: everything but the norms is elementwise; sums of squares of different shards add
up.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dtgpt.ops.operation import Operation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients and of weights


class Optimizer(Protocol):
    """The rule of one run on this rank. It holds the shards from which it was made, by their index, and its state.

    kind: its name in `state.json`, the `kind` of its config. takes: as in its config. updates: scalar on the device,
    the number of updates applied; the learning rate follows it. To restore the state, copy into `state` and fill
    `updates`.
    """

    kind: str
    takes: Mapping[str, Mapping[str, str | None]]
    updates: Tensor

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the state of the shard with this index, by the names that follow the parameter's in a checkpoint:
        tensors of the shard's shape, or of a matrix `[R, C]` a value for each row, `[R]` on one rank that has all of
        them and `[0]` on the others. The names may differ between parameters, but not between the ranks that hold one.
        Checkpoints hold fp32; the state may be in a narrower type.
        """

    def step(self, gradients: Sequence[Tensor], lr: Tensor, scale: Tensor, skip: Tensor | None = None) -> None:
        """Apply one update to the masters of all shards, and round it to their 16-bit copies.

        Nothing may wait for the device: a CUDA graph captures the step. It may communicate, if every rank of the plan
        calls the same collectives, also where it skips the step.

        gradients: one for each shard, in fp32, bf16 or fp16, summed over micro-batches and replicas. lr: fp32 scalar on
        the device, the learning rate of the schedule; other rates are multiples of it. scale: fp32 scalar on the
        device, a factor of the gradients (clipping and the inverse of the loss scale). skip: bool scalar on the device;
        where it is true nothing changes, whatever the values of gradients and scale.
        """


def _plain_add(_: Tensor, totals: Sequence[Tensor]) -> Callable[[list[Tensor]], None]:
    return partial(torch._foreach_add_, totals)


ACCUMULATE = Operation("accumulate", _plain_add, "totals += gradients")


class Accumulator:
    """Sum gradients of micro-batches in fp32 `totals`, contiguous tensors whose memory must not be replaced."""

    def __init__(self, totals: Sequence[Tensor]):
        for i, total in enumerate(totals):
            if total.dtype != torch.float32 or not total.is_contiguous():
                raise ValueError(f"total {i} must be fp32 and contiguous")
        self.totals = list(totals)
        self._add: Callable[[list[Tensor]], None] = ACCUMULATE(self.totals[0], self.totals)

    @torch.no_grad()
    def store(self, gradients: Sequence[Tensor]) -> None:
        """Set totals = gradients, those of the first micro-batch. PyTorch's kernel converts all in a few launches."""
        torch._foreach_copy_(self.totals, checked(gradients, self.totals))

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients to the totals in one pass."""
        self._add(checked(gradients, self.totals))


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, fp32 `[len(gradients)]`, accumulated in fp32 at least.

    PyTorch's kernel reads every gradient once, in a few launches for all, and adds the chunks of a tensor in a fixed
    order without atomics: equal gradients give equal sums.
    """
    return norms_of(gradients, 2).square_()


def norms_of(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor. PyTorch's kernel, which handles empty tensors inconsistently, gets the others."""
    norms = torch.zeros(len(gradients), device=gradients[0].device)
    filled = [(g, norm) for g, norm in zip(gradients, norms.unbind(), strict=True) if g.numel()]
    if filled:
        tensors, cells = zip(*filled, strict=True)
        # On a CPU it adds one square after the other: in fp32, a sum of 10^7 would be wrong by 4e-4.
        inner = torch.float64 if norms.device.type == "cpu" else torch.float32
        torch._foreach_copy_(cells, torch._foreach_norm(tensors, order, dtype=inner))
    return norms


def checked(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, contiguous. Raises ValueError where one does not fit its tensor of `others`."""
    if len(gradients) != len(others):
        raise ValueError(f"{len(gradients)} gradients for {len(others)} tensors")
    for i, (gradient, other) in enumerate(zip(gradients, others, strict=True)):
        if gradient.shape != other.shape or gradient.device != other.device or gradient.dtype not in DTYPES:
            found = f"{gradient.dtype} {tuple(gradient.shape)} on {gradient.device}"
            raise ValueError(f"gradient {i} is {found}; its tensor is {tuple(other.shape)} on {other.device}")
    return [gradient.contiguous() for gradient in gradients]
