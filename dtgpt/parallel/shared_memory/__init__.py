"""Memory that the GPUs of one host share, and collectives in it, with the bits of NCCL's or gloo's."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(transports=("dtgpt.parallel.shared_memory.transport:SHARED_MEMORY",))
