"""Batches for a GPU, which a thread makes while it computes the one before."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(batches=("dtgpt.data.prefetched.prefetcher:Prefetcher",))
