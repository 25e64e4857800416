"""Causal attention with dropout by global index: choice of back end, flash kernels."""
