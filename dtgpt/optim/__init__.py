"""From gradients to new weights: clipping, AdamW, the loss scale of fp16."""
