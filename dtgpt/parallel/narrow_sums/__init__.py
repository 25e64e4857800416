"""Sums of 16-bit gradients over replicas, as accurate as those of 32 bits, of half the bytes."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(flat_sums=("dtgpt.parallel.narrow_sums.sums:NarrowSum",))
