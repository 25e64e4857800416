"""What context parallelism cuts of a batch, and the ranks that share a sample."""

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.parallel.mesh import Mesh, RankCoordinates


def own_slice(batch: Batch, place: RankCoordinates) -> Batch:
    """Return the slice of a rank."""
    return slice_of(batch, place.cp, place.plan.cp)


def slice_of(batch: Batch, index: int, ranks: int) -> Batch:
    """Return the slice `[B, T / ranks]` of the tokens that one of the ranks computes which share samples. Document
    bounds stay those of all tokens, as the attention core wants them."""
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)

    def own(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole.chunk(ranks, dim=1)[index].contiguous()

    return batch._replace(
        tokens=batch.tokens.chunk(ranks, dim=1)[index].contiguous(),
        targets=own(batch.targets),
        positions=own(positions),
        # Those beside `by_token` are not of tokens.
        loss_weights=own(batch.loss_weights) if batch.by_token is None else batch.loss_weights,
        by_token=own(batch.by_token),
    )


def make_group(mesh: Mesh) -> dist.ProcessGroup:
    """Return the group of the ranks that have the other slices of this rank's samples."""
    plan = mesh.plan
    firsts = [rank for rank in range(mesh.world) if RankCoordinates(plan, rank).cp == 0]
    return mesh.subgroup([[first + index * plan.tp for index in range(plan.cp)] for first in firsts])
