"""The exchange of decode steps, in memory that tensor-parallel ranks share."""

import torch.distributed as dist

from dtgpt.ops.kernels.decode.exchange import SOURCE, STRUCTS, Exchange, bytes_of
from dtgpt.parallel.shared_memory.arena import AllRanks, share
from dtgpt.util.extension import library


def make_exchange(everyone: AllRanks, group: dist.ProcessGroup) -> Exchange | None:
    """Return the exchange of the tensor-parallel ranks of `group`, at most MOST_RANKS; None where NCCL runs instead,
    with a warning where the kernels cannot be built. All ranks of the mesh take part."""
    built = library(SOURCE, everyone.device, instead="NCCL", structs=STRUCTS)
    areas = share(everyone, group, [bytes_of(group.size())], usable=built is not None)
    return Exchange(built, areas[0].of_ranks, areas[0].rank) if built and areas else None
