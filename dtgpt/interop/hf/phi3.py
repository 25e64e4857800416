"""Phi-3 as transformers has it: a LLaMA whose queries, keys and values, and gate and up, are one matrix each there, one
after the other. dtgpt writes it as transformers' Llama or Mistral, which compute the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dtgpt.interop.hf.llama import Llama
from dtgpt.interop.keys import Key, check_keys, just, not_here
from dtgpt.models.config import ModelConfig
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.rotary import RotaryConfig
from dtgpt.models.source import Ranges

KEYS = {
    "rope_type": Key(
        just("default"), not_here("transformers has longrope for Phi-3, which dtgpt does not have"), "default"
    )
}


class Phi3(Llama):
    packed: ClassVar[Mapping[str, Sequence[str]]] = {
        "attn.qkv": ("attn.qkv_proj",),
        "mlp.gate_up": ("mlp.gate_up_proj",),
    }

    def from_stored(self, stored: list[Tensor], name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
        assert isinstance(config, RotaryConfig)
        rows = self.rows_of_group(name, config)
        if len(rows) > 1:
            groups = len(stored[0]) // sum(rows)
            stored = list(stored[0].split([groups * n for n in rows]))
        return super().from_stored(stored, name, config, part)

    def to_stored(self, whole: Tensor, name: str, config: ModelConfig) -> list[Tensor]:
        parts = super().to_stored(whole, name, config)
        return parts if len(parts) == 1 else [torch.cat(parts)]

    def read_config(self, settings: dict[str, Any], path: Path) -> LlamaConfig:
        for place in ("rope_scaling", "rope_parameters"):
            if isinstance(given := settings.get(place), dict):
                check_keys({"rope_type": given.get("rope_type", given.get("type", "default"))}, KEYS, path)
        return super().read_config(settings, path)
