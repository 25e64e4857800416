"""AdamW over all tensors at once, and sums over micro-batches."""
