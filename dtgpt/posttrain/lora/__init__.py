"""Adapters of low rank beside frozen weights (LoRA)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(sections={"lora": "dtgpt.posttrain.lora.config:LoraConfig"})
