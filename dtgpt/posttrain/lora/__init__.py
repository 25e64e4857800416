"""Adapters of low rank beside frozen weights (LoRA)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(sources=("dtgpt.posttrain.lora.source:ADAPTERS",))
