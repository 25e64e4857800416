"""Data parallelism by `fully_shard` (FSDP2; Zhao et al. 2023), at every level of ZeRO (Rajbhandari et al. 2020)."""

import warnings
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh

if TYPE_CHECKING:  # half a second to import, which a run without ZeRO does not need
    from torch.distributed.fsdp import FSDPModule


def shard_over_data(part: Decoder, mesh: Mesh, dtype: torch.dtype) -> None:
    """Wrap each block, then the whole part. Weights are all-gathered in `dtype`, in which they compute; gradients are
    reduce-scattered in fp32. What is not in a block stays whole from the forward pass on, also by ZeRO-3: backward
    begins with the head."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plan, policy = mesh.plan, MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Torch warns of writing in place into what a wrapped module returns; nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*part.blocks.values(), part):
        sharded = fully_shard(
            module,
            mesh=mesh.devices["shard"],
            mp_policy=policy,
            reshard_after_forward=plan.reshards and module is not part,
        )
        # Gradients are summed, not averaged: the loss already counts a micro-batch by its fraction of the global batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def is_wrapped(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return whether `fully_shard` has wrapped the module."""
    return hasattr(type(module), "set_requires_gradient_sync")


def set_step_phase(model: Decoder, zero: int, last: bool) -> None:
    """Prepare for a micro-batch: below ZeRO-2 gradients stay whole until the last one, below ZeRO-3 weights do."""
    if is_wrapped(model):
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_reshard_after_backward(last or zero == 3)
        model.set_is_last_backward(last)


def reshard(*parts: Decoder) -> None:
    """Free the weights that a forward pass all-gathered: a replayed step gathers them again without the knowledge of
    `fully_shard`, which would take the old ones for current."""
    for part in parts:
        for module in part.modules():
            if is_wrapped(module):
                module.reshard()
