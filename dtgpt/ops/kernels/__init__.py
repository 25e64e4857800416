"""Kernels that serve operations: Triton, CUDA, and PyTorch's own where it is told which to take."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(kernels={})
