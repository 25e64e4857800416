"""The protocol of optimizers: what training, checkpoints and planning know of the rule that changes the weights.

An optimizer is a config class, derived from `dtgpt.config.sections.OptimizerConfig`, and the class that its `make`
returns. docs/extending.md explains how to add one.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


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
