"""Adapters of low rank beside frozen weights (LoRA)."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"lora": "dtgpt.posttrain.lora.config:LoraConfig"},
    added_modules=("dtgpt.posttrain.lora.adapters:add_adapters",),
    initial_values=("dtgpt.posttrain.lora.adapters:initialize_adapters",),
    bases=("dtgpt.posttrain.lora.base:BASE",),
    sources=("dtgpt.posttrain.lora.source:ADAPTERS",),
    addends=("dtgpt.posttrain.lora.source:with_addend",),
)
