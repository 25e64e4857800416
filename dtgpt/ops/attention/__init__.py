"""Causal attention with dropout by global index: over a batch, and over keys and values that a cache keeps."""
