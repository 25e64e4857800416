"""Phi-3 as transformers has it: a LLaMA whose queries, keys and values, and gate and up, are one matrix each there, one
after the other. dtgpt writes it as transformers' Llama or Mistral, which compute the same.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import check_rules
from dtgpt.interop.hf import llama
from dtgpt.interop.hf.llama import BUFFERS, PREFIX, rows_of_group, write_config
from dtgpt.models.config import ModelConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.source import Part

__all__ = ["BUFFERS", "PREFIX", "from_stored", "read_config", "stored_names", "to_stored", "write_config"]
FUSED = {"attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"}
SCALINGS = ("rope_scaling", "rope_parameters")


def stored_names(name: str) -> list[str]:
    """Return transformers' names of dtgpt's parameter `name`, without PREFIX."""
    for ours, theirs in FUSED.items():
        if f".{ours}." in name:
            return [name.replace(ours, theirs).replace("blocks.", "layers.")]
    return llama.stored_names(name)


def from_stored(stored: list[Tensor], name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return the elements `part` of dtgpt's parameter `name`."""
    rows = rows_of_group(name, config)
    if len(rows) > 1:
        groups = len(stored[0]) // sum(rows)
        stored = list(stored[0].split([groups * n for n in rows]))
    return llama.from_stored(stored, name, config, part)


def to_stored(whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
    """Return dtgpt's parameter `name` as transformers has it."""
    parts = llama.to_stored(whole, name, config)
    return parts if len(parts) == 1 else [torch.cat(parts)]


def read_config(settings: dict[str, Any], path: Path) -> LlamaConfig:
    """Return the shape that config.json describes, with transformers' defaults. Raise UserError for options that dtgpt
    does not have."""
    reason = "transformers has longrope for Phi-3, which dtgpt does not have"
    for place in SCALINGS:
        if isinstance(given := settings.get(place), dict):
            rope = {"rope_type": given.get("rope_type", given.get("type", "default"))}
            check_rules(rope, {"rope_type": ("default", lambda v: v == "default", reason)}, path)
    return llama.read_config(settings, path)
