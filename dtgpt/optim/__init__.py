"""From gradients to new weights: clipping, updates, the loss scale of fp16."""
