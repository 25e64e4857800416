"""Adapters of low rank beside frozen weights (LoRA)."""
