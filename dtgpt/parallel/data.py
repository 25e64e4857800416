"""Data parallelism through `fully_shard` at every ZeRO level (Rajbhandari et al. 2020), and passes without a pipeline.

One path for all: replicas are `fully_shard` over a mesh (replicas, 1), ZeRO cuts over all of dp. It runs at dp=1 too,
where it brings the gradients of parameters that every tp rank holds into one state.
"""

import warnings

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtgpt.model import GPT
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.passes import LossFunction, Passes


def shard_over_data(part: GPT, mesh: Mesh, dtype: torch.dtype) -> None:
    """Wrap each block, then what is around them. The blocks' weights travel in `dtype`, the one they compute in;
    gradients are summed in fp32."""
    plan = mesh.plan
    names = ("replicate", "shard") if plan.replicate > 1 else ("shard",)
    options = {"mesh": mesh.devices[names], "reshard_after_forward": plan.zero == 3 and plan.pp == 1}
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Torch warns of writing in place into what a wrapped module returns; nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in part.blocks.values():
        fully_shard(block, **options, mp_policy=MixedPrecisionPolicy() if dtype == torch.float32 else narrow)
    fully_shard(part, **options)  # the tied table is summed into fp32 by the embedding: its policy changes nothing


class Accumulation(Passes):
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, model: GPT, mesh: Mesh, loss: LossFunction):
        self.model, self.mesh, self.loss = model, mesh, loss

    def gradients(self, micro_batches: int, windows: Tensor, keys: Tensor | None) -> Tensor:
        losses = []
        chunks = windows.chunk(micro_batches)
        chunks_of_keys = [None] * micro_batches if keys is None else keys.chunk(micro_batches)
        for index, (window, key) in enumerate(zip(chunks, chunks_of_keys, strict=True)):
            self._announce(last=index == micro_batches - 1)
            loss = self.loss(self.model(window[:, :-1], key), window[:, 1:])
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def _announce(self, last: bool) -> None:
        """Below ZeRO-2 gradients stay whole until the last micro-batch; below ZeRO-3 weights do."""
        if isinstance(self.model, FSDPModule):
            zero = self.mesh.plan.zero
            self.model.set_requires_gradient_sync(last or zero >= 2)
            self.model.set_reshard_after_backward(last or zero == 3)
            self.model.set_is_last_backward(last)
