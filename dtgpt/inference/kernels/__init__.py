"""Decode steps by kernels that compute whole blocks, and, where asked for, the bits of training's forward pass."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    rank_steps=("dtgpt.inference.kernels.serve:KernelStep",), exact_bits=("dtgpt.inference.kernels.serve:BITS",)
)
