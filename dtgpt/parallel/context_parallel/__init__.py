"""Context parallelism: each rank has a slice of the tokens of every sample."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    build=("dtgpt.parallel.context_parallel.entries:DROPOUT", "dtgpt.parallel.context_parallel.entries:HEADS"),
    batch_cuts=("dtgpt.parallel.context_parallel.slices:slice_of",),
)
