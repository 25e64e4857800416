"""What GPUs of one host send each other through memory that they share, where NCCL would take longer, or take
multiprocessors from what runs beside it."""

import torch.distributed as dist

from dtgpt.config.plan import GPUS_OF_HOST
from dtgpt.ops.kernels.decode.exchange import SOURCE, STRUCTS, Exchange, bytes_of
from dtgpt.ops.kernels.extension import library
from dtgpt.parallel.collectives import Transport
from dtgpt.parallel.shared_memory.arena import AllRanks, may_share, share
from dtgpt.parallel.shared_memory.collectives import open_collectives
from dtgpt.parallel.shared_memory.edges import open_edges
from dtgpt.parallel.shared_memory.pushed_shards import push_shards
from dtgpt.parallel.shared_memory.reduce import open_sums


def make_exchange(everyone: AllRanks, group: dist.ProcessGroup) -> Exchange | None:
    """Return the exchange of decode steps of the tensor-parallel ranks of `group`, at most MOST_RANKS; None where NCCL
    runs instead, with a warning where the kernels cannot be built. All ranks of the mesh take part."""
    built = library(SOURCE, everyone.device, instead="NCCL", structs=STRUCTS)
    areas = share(everyone, group, [bytes_of(group.size())], usable=built is not None)
    return Exchange(built, areas[0].of_ranks, areas[0].rank) if built and areas else None


SHARED_MEMORY = Transport(
    reaches=lambda ranks, apart: 1 < ranks <= GPUS_OF_HOST // apart,  # as far as a host's usual number of GPUs tells
    serves=may_share,
    open_collectives=open_collectives,
    open_sums=open_sums,
    open_edges=open_edges,
    open_shards=push_shards,
    open_exchange=make_exchange,
)
