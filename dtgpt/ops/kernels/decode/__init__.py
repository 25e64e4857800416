"""Kernels of decode steps in 16 bits: transformer blocks for one token each of a few sequences."""
