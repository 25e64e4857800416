"""Gradients of experts' matrices, added to their sums over micro-batches by the products that make them."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(buckets=(When("dtgpt.parallel.product_sums.bucket:FilledBucket", ("model.num_experts",)),))
