"""What GPUs of one host send each other through memory that they share, where NCCL would take longer, or take
multiprocessors from what runs beside it."""

from dtgpt.parallel.collectives import GPUS_OF_HOST, Transport
from dtgpt.parallel.shared_memory.arena import may_share
from dtgpt.parallel.shared_memory.collectives import open_collectives
from dtgpt.parallel.shared_memory.edges import open_edges
from dtgpt.parallel.shared_memory.exchange import make_exchange
from dtgpt.parallel.shared_memory.pushed_shards import push_shards
from dtgpt.parallel.shared_memory.reduce import open_sums

SHARED_MEMORY = Transport(
    reaches=lambda ranks, apart: 1 < ranks <= GPUS_OF_HOST // apart,  # as far as a host's usual number of GPUs tells
    serves=may_share,
    open_collectives=open_collectives,
    open_sums=open_sums,
    open_edges=open_edges,
    open_shards=push_shards,
    open_exchange=make_exchange,
)
