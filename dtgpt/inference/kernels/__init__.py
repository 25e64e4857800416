"""Decode steps by kernels that compute whole blocks, and, where asked for, the bits of training's forward pass."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(decoders=("dtgpt.inference.kernels.serve:KERNELS",))
