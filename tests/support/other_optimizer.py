"""An optimizer that differs from AdamW wherever dtgpt could have taken AdamW for granted: matrices have one state, in
bf16, vectors have none. Config class and rule stand in this one file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.inventory import Shape
from dtgpt.models.roles import Role
from dtgpt.parallel.shards import Shards
from dtgpt.util.field_types import Pattern


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(OptimizerConfig):
    """Momentum for matrices, plain gradient descent for vectors."""

    kind: Annotated[str, "optimizer", Pattern("momentum", "is another optimizer; use momentum")] = "momentum"
    momentum: Annotated[float, "decay rate of the momentum"] = 0.5

    def make(self, shards: Shards) -> "Momentum":
        return Momentum(self, shards)

    def state_bytes(self, shape: Shape, role: Role | None) -> int:
        return 2 if len(shape) > 1 else 0


class Momentum:
    kind, takes = "momentum", MomentumConfig.takes

    def __init__(self, config: MomentumConfig, shards: Shards):
        self.config, self.shards = config, shards
        self.buffers = {s.index: torch.zeros_like(s.local, dtype=torch.bfloat16) for s in shards if s.local.dim() > 1}
        self.updates = torch.zeros((), dtype=torch.int64, device=shards.mesh.device)

    def state(self, index: int) -> dict[str, Tensor]:
        return {"momentum": self.buffers[index]} if index in self.buffers else {}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor, scale: Tensor, skip: Tensor | None = None) -> None:
        kept = torch.tensor(False) if skip is None else skip
        for shard, gradient in zip(self.shards, gradients, strict=True):
            direction = gradient.float() * scale
            if shard.index in self.buffers:
                buffer = self.buffers[shard.index]
                direction += self.config.momentum * buffer.float()
                buffer.copy_(torch.where(kept, buffer, direction))
            shard.local.copy_(torch.where(kept, shard.local, shard.local - lr * direction))
            if shard.low_precision is not None:
                shard.low_precision.copy_(shard.local)
        self.updates += ~kept
