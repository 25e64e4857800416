"""Models for inference under tensor parallelism whose modules have plain tensors in place of DTensors."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(inference_stages=("dtgpt.parallel.local_weights.localize:inference_stages",))
