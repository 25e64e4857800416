"""Steps of generation as CUDA graphs, and prompts that are read together, which takes few shapes and thus graphs."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(rank_steps=("dtgpt.inference.captured.step:CapturedStep",))
