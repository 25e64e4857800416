"""Pieces of a training step as CUDA graphs."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(graphs=("dtgpt.parallel.graphs.captured:CapturedGraphs",))
