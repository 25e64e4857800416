"""Matrix products of 8-bit floats: quantisation by scales that are powers of two, and the products."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(precisions={"fp8": "dtgpt.config.fp8:PRECISION"})
